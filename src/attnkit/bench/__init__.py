"""Measure backends beside their rivals: same tensors, same process, checked before they are timed.

In: named workloads, backends by any name selection knows, installed rivals. Out: a record (JSON), a
table and a roofline plot. `python -m attnkit.bench` needs no typer and no rich.
"""
