"""FlexAttention as a backend: `backend` (host), `plan` (whose is what), `mask` (who sees whom)."""
