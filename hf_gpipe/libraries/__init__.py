"""The private and undocumented names of libraries that the package uses, in a module for each library."""
