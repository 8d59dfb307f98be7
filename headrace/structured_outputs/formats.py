"""Describes the `format`s of JSON Schema by regular expressions."""

from __future__ import annotations

_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_HEX4 = "[0-9a-fA-F]{1,4}"
NATIVE_FORMATS = {
    "duration": r"P(?:[0-9]{1,4}W|[0-9]{1,4}D(?:T[0-9]{1,4}H)?|T[0-9]{1,4}H(?:[0-9]{1,4}M)?|T[0-9]{1,4}[MS])",
    "email": r"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@" + _HOST,
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": f"(?:{_HEX4}:){{7}}{_HEX4}|(?:{_HEX4}:){{1,6}}:{_HEX4}|::(?:{_HEX4})?",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:\/\/[A-Za-z0-9._~:\/?#@!$&'()*+,;=%-]+",
}
"""Formats that llguidance holds, each with a regex of some of what it allows, for text that is no JSON string."""
_CHARS = r"[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2}"
_URI_REFERENCE = rf"([A-Za-z][A-Za-z0-9+\-.]*:)?([A-Za-z0-9\-._~!$&'()*+,;=@/?]|%[0-9A-Fa-f]{{2}})*(#({_CHARS})*)?"
_VARIABLE = r"[A-Za-z0-9_]+(:[1-9][0-9]{0,3}|\*)?"
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "uri-reference": f"^{_URI_REFERENCE}$",
    "uri-template": rf"^({_CHARS}|#|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*$",
}
"""Other formats, each with its regex. Of dates and times llguidance would take those that are none, such as February 29
in any year, and leap seconds, at which most readers fail."""
REFUSED_FORMATS = frozenset((
    "iri", "iri-reference", "idn-email", "idn-hostname", "json-pointer", "relative-json-pointer", "regex",
))  # fmt: skip
"""Those of JSON Schema that are not held."""
