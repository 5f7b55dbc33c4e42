"""The private and undocumented names of libraries that the package uses, in a module for each library.

Other modules touch no such name (`tests/libraries/test_private.py`), so a release that renames one, or changes what it
means, is mended here. `tests/libraries/` has a test of what each of them does.
"""
