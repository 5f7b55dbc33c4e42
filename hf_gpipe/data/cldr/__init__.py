"""A parallel corpus made offline from Unicode CLDR."""

from hf_gpipe.data.cldr.corpus import cldr_corpus
from hf_gpipe.data.cldr.coverage import cldr_languages

__all__ = ["cldr_corpus", "cldr_languages"]
