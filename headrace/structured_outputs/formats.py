"""Describes the `format`s of JSON Schema that llguidance does not know by regular expressions."""

from __future__ import annotations

NATIVE_FORMATS = frozenset((
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
))  # fmt: skip
"""Formats that llguidance holds."""
_CHARS = r"[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2}"
_URI_REFERENCE = rf"([A-Za-z][A-Za-z0-9+\-.]*:)?([A-Za-z0-9\-._~!$&'()*+,;=@/?]|%[0-9A-Fa-f]{{2}})*(#({_CHARS})*)?"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_VARIABLE = r"[A-Za-z0-9_]+(:[1-9][0-9]{0,3}|\*)?"
FORMATS = {
    "uri-reference": f"^{_URI_REFERENCE}$",
    "iri": rf"^[A-Za-z][A-Za-z0-9+\-.]*:({_CHARS})+$",
    "iri-reference": f"^{_URI_REFERENCE}$",
    "idn-email": rf"^[A-Za-z0-9._%+\-]+@{_LABEL}(\.{_LABEL})+$",
    "idn-hostname": rf"^{_LABEL}(\.{_LABEL})*$",
    "uri-template": rf"^({_CHARS}|#|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*$",
    "json-pointer": "^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
}
"""Format -> its regex. Internationalized ones are held in their ASCII part, which all readers take."""
