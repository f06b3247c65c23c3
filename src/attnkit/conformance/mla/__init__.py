"""The kit for backends over latents (MLA): cases, answers, laws and claims of their own."""
