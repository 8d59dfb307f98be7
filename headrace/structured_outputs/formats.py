"""Describes the `format`s of JSON Schema by regular expressions."""

from __future__ import annotations

_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_HEX4 = "[0-9a-fA-F]{1,4}"
NATIVE_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
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
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_VARIABLE = r"[A-Za-z0-9_]+(:[1-9][0-9]{0,3}|\*)?"
_ATOM = (
    r"(?:[A-Za-z0-9 _@%&=:;,<>/'#!~-]|\.|\\[dDwWsS.(){}\[\]*+?|^$/\\-]"
    r"|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9 _@%=:;,/.]|\\[dws\]\\.-])+\])"
)
_REPEATED = rf"(?:{_ATOM}(?:[*+?]\??|\{{[0-9]{{1,2}}\}})?)*"
_GROUP = rf"\((?:\?:)?{_REPEATED}(?:\|{_REPEATED})*\)[*+?]?"
FORMATS = {
    "uri-reference": f"^{_URI_REFERENCE}$",
    "iri": rf"^[A-Za-z][A-Za-z0-9+\-.]*:({_CHARS})+$",
    "iri-reference": f"^{_URI_REFERENCE}$",
    "idn-email": rf"^[A-Za-z0-9._%+\-]+@{_LABEL}(\.{_LABEL})+$",
    "idn-hostname": rf"^{_LABEL}(\.{_LABEL})*$",
    "uri-template": rf"^({_CHARS}|#|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*$",
    "json-pointer": "^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
    "regex": rf"^\^?(?:{_REPEATED}|{_GROUP}|\|)*\$?$",
}
"""Format that llguidance does not know -> its regex. Internationalized ones are held in their ASCII part, which all
readers take; regular expressions without groups in groups."""
