"""A parallel corpus made offline from Unicode CLDR."""

from hf_gpipe.tasks.translation.cldr.corpus import cldr_corpus
from hf_gpipe.tasks.translation.cldr.coverage import cldr_languages

__all__ = ["cldr_corpus", "cldr_languages"]
