"""Every error attnkit raises at a user, as one tree.

    AttnkitError
     |- ConfigurationError (ValueError)   a value of a layer, spec, variant or device is not allowed
     |- BackendError
     |   |- UnknownBackend                no backend has this name
     |   |- BackendUnavailable            known, but cannot run here (library or device missing)
     |   `- UnsupportedConfiguration      can run here, but not this layer; carries every reason
     |- BatchError (ValueError)           a batch's lengths, tables or tensors contradict each other
     |- CacheError
     |   `- OutOfPages                    the page pool cannot give what was asked
     |- ModelError                        a checkpoint cannot be found, read or driven
     `- RequestError (ValueError)         a prompt or its sampling parameters are not allowed

A message says what was given, what is allowed and what to do next. Faults of our own are asserts.
"""


class AttnkitError(Exception):
    """Root of the tree: catch this to catch everything attnkit raises on purpose."""


class ConfigurationError(AttnkitError, ValueError):
    """A static value (of a layer, spec, variant, device or environment variable) is not allowed."""


class BackendError(AttnkitError):
    """A backend could not be chosen."""


class UnknownBackend(BackendError):
    """No table row, registration, entry point or file has this name, or what has it is no backend."""


class BackendUnavailable(BackendError):
    """The backend exists but cannot run on this machine."""


class UnsupportedConfiguration(BackendError):
    """The backend runs here but not this layer.

    Attributes:
        reasons: every reason, in the order of `AttentionBackend.validate_configuration`.
    """

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class BatchError(AttnkitError, ValueError):
    """Lengths, block tables or tensors of one batch contradict each other."""


class CacheError(AttnkitError):
    """The paged KV cache cannot do what was asked."""


class OutOfPages(CacheError):
    """The pool has fewer free pages than were asked for."""


class ModelError(AttnkitError):
    """A checkpoint cannot be found, read or driven."""


class RequestError(AttnkitError, ValueError):
    """A prompt or its sampling parameters are not allowed."""
