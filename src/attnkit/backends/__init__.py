"""The backends attnkit ships: name -> "module:Class", strings only, in order of preference.

Nothing is imported until a name is asked for, so a machine without Triton lists it all the same.
"""

BACKENDS: dict[str, str] = {
    "hopper": "attnkit.backends.hopper.backend:HopperBackend",
    "triton": "attnkit.backends.triton.backend:TritonBackend",
    "cpu": "attnkit.backends.cpu.backend:CpuBackend",
    "reference": "attnkit.backends.reference:ReferenceBackend",
}
