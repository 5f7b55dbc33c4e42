"""Modules and functions in place of those of the library, or around them."""
