"""Language codes of gettext's directories as the corpus has them: de, pt_BR, sr_Latn, zh_Hans."""

from __future__ import annotations

import re

from babel.core import get_global

#: gettext's modifiers that name a script. Others, as @valencia and @ijekavian, name a variant of a language.
_SCRIPTS = {
    **{"latin": "Latn", "latn": "Latn", "iqtelif": "Latn", "cyrillic": "Cyrl", "cyrl": "Cyrl"},
    **{"arabic": "Arab", "devanagari": "Deva"},
}

#: Codes whose meaning in gettext does not follow from CLDR's likely regions. pt is the language of Portugal there.
_KNOWN = {
    **{"bn_IN": "bn", "ku_IQ": "ku", "no": "nb", "no_NO": "nb", "pt_PT": "pt", "pt_BR": "pt_BR", "tl": "fil"},
    **{"zh_CN": "zh_Hans", "zh_SG": "zh_Hans", "zh_TW": "zh_Hant"},
}
_CODE = re.compile(r"([a-z]{2,3})(?:_([A-Z][a-z]{3}))?(?:_([A-Z]{2}|[0-9]{3}))?(?:\.[\w-]+)?(?:@(\w+))?")


def language_of(code: str) -> str | None:
    """A gettext code in the corpus's form: the language, with its script if that is not the usual one.

    Returns:
        None for English, for regional variants of a language (es_MX, ca@valencia), and for what is no code.
    """
    match = _CODE.fullmatch(code.replace("-", "_"))
    if match is None or match[1] == "en":
        return None
    language, script, region, modifier = match.groups()
    without_modifier = "_".join(filter(None, (language, script, region)))
    if modifier is None and without_modifier in _KNOWN:
        return _KNOWN[without_modifier]
    if modifier is not None:
        if script is not None or modifier.lower() not in _SCRIPTS:
            return None
        script = _SCRIPTS[modifier.lower()]
    # CLDR's older names of a language, such as iw for he.
    language = get_global("language_aliases").get(language, language)
    if not re.fullmatch("[a-z]{2,3}", language):
        return None
    usual_script, usual_region = _likely(language)
    if region not in (None, usual_region):
        return None
    if script in (None, usual_script):
        # Chinese has two scripts that are both usual.
        return "zh_Hans" if language == "zh" else language
    return f"{language}_{script}"


def _likely(language: str) -> tuple[str | None, str | None]:
    """The usual script and region of a language by CLDR."""
    parts = get_global("likely_subtags").get(language, "").split("_")
    return (parts[1], parts[2]) if len(parts) == 3 else (None, None)
