"""Bridges into other engines, the outer ring: nothing else of attnkit imports them."""
