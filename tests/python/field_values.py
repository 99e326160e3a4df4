"""Types of document fields: values at their limits and random ones, and what each is in Python.

What is expected is computed from a document's JSON with `json`, `decimal` and `datetime` alone.
"""

import base64
import json
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction

_EXACT = Context(prec=200)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_TEXTS = [
    "", " ", "text", "NULL", "null", "{}", "\\N", "\t\r\n", '"quoted"', "it's", "back\\slash", "%s",
    "\N{LATIN SMALL LETTER E WITH ACUTE}", "e\N{COMBINING ACUTE ACCENT}", "\u65e5\u672c\u8a9e",
    "\N{GRINNING FACE}", "\N{RIGHT-TO-LEFT OVERRIDE}x", "\ufeffmark", "\x01\x7f\x80", "\uffff",
    "\U0010ffff", "a" * 300, "\N{GRINNING FACE}" * 100,
]  # fmt: skip


class Number(str):
    """The text of a number in JSON."""

    __slots__ = ()


def parse(text):
    """Parses JSON; numbers stay text."""
    return json.loads(text, parse_int=Number, parse_float=Number)


def compact(value):
    """Returns the JSON of what `parse` gives."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(k)}:{compact(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(compact, value))}]"
    return json.dumps(value)


class Bits(bytes):
    """The bits of a number with a sign, also if it is zero."""

    __slots__ = ()

    def without_sign_of_zero(self):
        return Bits(len(self)) if self[-1] == 0x80 and not any(self[:-1]) else self


def without_signs_of_zeros(value):
    """Returns what `Kind.of` or `Kind.read` gives, with zeros that have no sign."""
    if isinstance(value, Bits):
        return value.without_sign_of_zero()
    if isinstance(value, list | tuple):
        return type(value)(map(without_signs_of_zeros, value))
    if isinstance(value, dict):
        return {name: without_signs_of_zeros(each) for name, each in value.items()}
    return value


class Kind:
    """A type of fields.

    `texts` gives JSON of values; `expected` and `found` give a value, of `parse` and of a reader,
    in a form in which they can be compared.
    """

    ddl = ""

    def texts(self, chance):
        raise NotImplementedError

    def of(self, parsed):
        return None if parsed is None else self.expected(parsed)

    def read(self, value):
        return None if value is None else self.found(value)

    def expected(self, parsed):
        return parsed

    def found(self, value):
        return value

    def __repr__(self):
        return self.ddl


class Boolean(Kind):
    ddl = "BOOLEAN"

    def texts(self, _):
        return ["true", "false"]

    def found(self, value):
        return value if type(value) is bool else repr(value)


class Integer(Kind):
    def __init__(self, ddl, bits):
        self.ddl, self.low, self.high = ddl, -(1 << bits - 1), (1 << bits - 1) - 1

    def texts(self, chance):
        chosen = [0, 1, -1, 10, 100, self.low, self.high, self.low + 1, self.high - 1]
        return [str(each) for each in [*chosen, chance.randint(self.low, self.high)]] + ["-0"]

    def expected(self, parsed):
        return int(parsed)

    def found(self, value):
        return value if type(value) is int else repr(value)


class Float(Kind):
    """Compared by its bits, so that a zero has its sign."""

    def __init__(self, ddl):
        self.ddl = ddl
        self.form, self.bits = ("<f", "<I") if ddl == "FLOAT" else ("<d", "<Q")
        self.least, self.limit = (1, 0x7F7FFFFF) if ddl == "FLOAT" else (1, 0x7FEFFFFFFFFFFFFF)
        self.normal = 0x00800000 if ddl == "FLOAT" else 0x0010000000000000

    def _number(self, bits):
        return struct.unpack(self.form, struct.pack(self.bits, bits))[0]

    def texts(self, chance):
        chosen = [self.least, self.limit, self.normal, self.normal - 1, 2 * self.least]
        chosen += [chance.randrange(self.least, bound) for bound in (self.normal, self.limit) * 3]
        numbers = [repr(self._number(each)) for each in chosen]
        plain = ["0.0", "-0.0", "0", "-0", "0.1", "1e0", "100", "16777217", "9007199254740993"]
        return plain + numbers + [f"-{each}" for each in numbers]

    def expected(self, parsed):
        if self.ddl == "DOUBLE":
            return Bits(struct.pack("<d", float(parsed)))
        exact = abs(Fraction(str(parsed)))
        near = struct.unpack("<I", struct.pack("<f", abs(float(parsed))))[0]
        around = [each for each in (near - 1, near, near + 1) if 0 <= each <= self.limit]
        # The nearest; of two, the even one.
        best = min(around, key=lambda each: (abs(Fraction(self._number(each)) - exact), each & 1))
        sign = 0x80000000 if str(parsed).startswith("-") else 0
        return Bits(struct.pack("<I", best | sign))

    def found(self, value):
        return Bits(struct.pack(self.form, value)) if type(value) is float else repr(value)


class DecimalOf(Kind):
    def __init__(self, precision, scale):
        self.precision, self.scale = precision, scale
        self.ddl = f"DECIMAL({precision}, {scale})"

    def _text(self, digits):
        sign, digits = ("-", -digits) if digits < 0 else ("", digits)
        padded = str(digits).rjust(self.scale + 1, "0")
        whole, rest = padded[: len(padded) - self.scale], padded[len(padded) - self.scale :]
        return sign + whole + ("." + rest if rest else "")

    def texts(self, chance):
        limit = 10**self.precision - 1
        one = 10**self.scale
        chosen = [0, 1, -1, limit, -limit, limit // 10 * 10, -(10 ** (self.precision - 1))]
        if self.precision - self.scale > 4:
            chosen += [10000 * one + one // 10, limit // one // 10000 * 10000 * one + 1]
        drawn = chance.randint(0, 10 ** chance.randint(1, self.precision) - 1)
        texts = [self._text(each) for each in [*chosen, drawn, -drawn]]
        # Rounded, as long as that does not take a digit more.
        texts.append(f"{self._text(limit // 10)}{'' if self.scale else '.'}5")
        texts.append(f"{chance.randint(0, 9)}e{self.precision - self.scale - 1}")
        return [f'"{each}"' if n % 3 == 2 else each for n, each in enumerate(texts)]

    def expected(self, parsed):
        exponent = Decimal(1).scaleb(-self.scale)
        return Decimal(parsed).quantize(exponent, ROUND_HALF_UP, _EXACT)

    def found(self, value):
        return value if isinstance(value, Decimal) else repr(value)


class Date(Kind):
    ddl = "DATE"

    def texts(self, chance):
        days = chance.randint(1, date.max.toordinal())
        plain = ["0001-01-01", "9999-12-31", "1970-01-01", "1969-12-31", "2024-02-29", "1582-10-10"]
        return [f'"{each}"' for each in [*plain, date.fromordinal(days).isoformat()]]

    def expected(self, parsed):
        return date.fromisoformat(parsed)

    def found(self, value):
        return value if type(value) is date else repr(value)


class Timestamp(Kind):
    """Compared as microseconds since 1970, without a time zone as if it were in UTC."""

    def __init__(self, ddl):
        self.ddl = ddl
        self.has_zone = ddl == "TIMESTAMP"

    def texts(self, chance):
        plain = [
            "0001-01-01T00:00:00", "0001-01-01T00:00:00.000001", "9999-12-31T23:59:59.999999",
            "1970-01-01T00:00:00", "1969-12-31T23:59:59.999999", "2024-02-29T12:00:00.5",
            "1900-01-01T00:00:00", "1582-10-10T10:10:10", "2038-01-19T03:14:08",
        ]  # fmt: skip
        moment = timedelta(
            days=chance.randint(1, date.max.toordinal()),
            microseconds=chance.randrange(86_400_000_000),
        )
        plain.append((datetime(1, 1, 1) + moment - timedelta(days=1)).isoformat())  # noqa: DTZ001
        if not self.has_zone:
            return [f'"{each}"' for each in plain]
        more = [
            "2024-02-29T12:00:00.25+05:30",
            "9999-12-31T23:59:59-00:00",
            "2000-01-01T00:00:00-12:00",
        ]
        return (
            [f'"{each}Z"' for each in plain] + [f'"{each}"' for each in more] + ["0", "1700000000"]
        )

    def expected(self, parsed):
        if isinstance(parsed, Number):
            return int(parsed) * 1_000_000
        moment = datetime.fromisoformat(parsed)
        return self._microseconds(moment if self.has_zone else moment.replace(tzinfo=UTC))

    def found(self, value):
        if type(value) is not datetime or (value.tzinfo is not None) != self.has_zone:
            return repr(value)
        return self._microseconds(value if self.has_zone else value.replace(tzinfo=UTC))

    def _microseconds(self, moment):
        return (moment - _EPOCH) // _MICROSECOND


class Binary(Kind):
    ddl = "BINARY"

    def texts(self, chance):
        values = [b"", b"\0", b"\xff\xfe\0", b"text", bytes(range(256)), chance.randbytes(40)]
        return [f'"{base64.b64encode(each).decode()}"' for each in values]

    def expected(self, parsed):
        return base64.b64decode(parsed)

    def found(self, value):
        return bytes(value) if isinstance(value, bytes | memoryview | bytearray) else repr(value)


class String(Kind):
    ddl = "STRING"

    def texts(self, chance):
        drawn = "".join(map(chr, (chance.randint(1, 0xD7FF) for _ in range(50))))
        other = ["0", "-0.0", "1.50", "1e400", "true", "[]", "{}", '[1,2.50,null,{"a":""}]']
        return [
            json.dumps(each, ensure_ascii=n % 2 == 0) for n, each in enumerate([*_TEXTS, drawn])
        ] + other

    def expected(self, parsed):
        return str(parsed) if isinstance(parsed, str) else compact(parsed)

    def found(self, value):
        return value if type(value) is str else repr(value)


def _joined(brackets, parts):
    return f"{brackets[0]}{','.join(parts)}{brackets[1]}"


class Array(Kind):
    def __init__(self, of):
        self.item, self.ddl = of, f"ARRAY<{of.ddl}>"

    def texts(self, chance):
        items = self.item.texts(chance)
        some = [chance.choices([*items, "null"], k=chance.randint(1, 7)) for _ in range(3)]
        chosen = [[], ["null"], items, ["null", items[0], "null"], ["null"] * 9, items[:1], *some]
        return [_joined("[]", each) for each in chosen]

    def expected(self, parsed):
        return [self.item.of(each) for each in parsed]

    def found(self, value):
        return [self.item.read(each) for each in value]


class Map(Kind):
    """Compared by its keys, in order; readers have it as a dict, as pairs or as structs."""

    def __init__(self, of):
        self.item, self.ddl = of, f"MAP<STRING, {of.ddl}>"

    def texts(self, chance):
        items = self.item.texts(chance)
        keys = [json.dumps(each) for each in _TEXTS]
        some = [[(key, chance.choice(items)) for key in chance.sample(keys, 4)] for _ in range(3)]
        nulls = [(key, "null") for key in keys]
        chosen = [[], nulls[:1], nulls, [*zip(keys, items, strict=False)], *some]
        return [_joined("{}", [f"{key}:{value}" for key, value in each]) for each in chosen]

    def expected(self, parsed):
        return sorted((key, self.item.of(each)) for key, each in parsed.items())

    def found(self, value):
        if isinstance(value, dict):
            pairs = [*value.items()]
        else:
            pairs = [tuple(each.values()) if isinstance(each, dict) else each for each in value]
        return sorted(
            ((key, self.item.read(each)) for key, each in pairs), key=lambda pair: pair[0]
        )


class Struct(Kind):
    def __init__(self, **fields):
        self.fields = fields
        self.ddl = f"STRUCT<{', '.join(f'{name}: {of.ddl}' for name, of in fields.items())}>"

    def texts(self, chance):
        of_fields = {name: of.texts(chance) for name, of in self.fields.items()}
        full = [
            [(name, texts[n % len(texts)]) for name, texts in of_fields.items()]
            for n in range(max(map(len, of_fields.values())))
        ]
        some = [[pair for pair in each if chance.random() < 0.5] for each in full]
        chosen = [[], [(name, "null") for name in of_fields], [("other", "1")], *full, *some]
        return [_joined("{}", [f'"{name}":{text}' for name, text in each]) for each in chosen]

    def expected(self, parsed):
        return {name: of.of(parsed.get(name)) for name, of in self.fields.items()}

    def found(self, value):
        return {name: self.fields[name].read(each) for name, each in value.items()}


SCALARS = [
    Boolean(), Integer("TINYINT", 8), Integer("SMALLINT", 16), Integer("INT", 32),
    Integer("BIGINT", 64), Float("FLOAT"), Float("DOUBLE"), Date(), Timestamp("TIMESTAMP"),
    Timestamp("TIMESTAMP_NTZ"), Binary(), String(), DecimalOf(38, 10), DecimalOf(5, 2),
]  # fmt: skip
LISTS = [Array(of) for of in SCALARS]
# Not for pyiceberg, which makes an empty list or map of one that is null.
OF_STRUCTS = [
    Array(Struct(a=String(), b=Array(Float("DOUBLE")))), Map(Struct(a=Boolean(), m=Map(Date()))),
]  # fmt: skip
NESTED = [
    *(Map(of) for of in SCALARS),
    Struct(**{f"f{n}": of for n, of in enumerate(SCALARS)}),
    Array(Array(Integer("INT", 32))), Array(Array(Array(String()))),
    Map(Array(DecimalOf(20, 4))), Map(Map(Timestamp("TIMESTAMP"))),
    Struct(a=Struct(b=Struct(c=Binary(), l=Array(Integer("BIGINT", 64))))),
]  # fmt: skip
DECIMALS = [DecimalOf(p, s) for p in range(1, 39) for s in range(p + 1)]


def documents(kinds, chance, step):
    """Gives documents that have each value of each kind, as text, by key.

    `kinds` are those of the fields, by name. Each step has other values under a key. A field is
    null now and then, or not there.
    """
    texts = {name: [*kind.texts(chance), "null", None] for name, kind in kinds.items()}
    count = max(map(len, texts.values()))
    found = {}
    for n in range(count):
        fields = {name: of[(n + step * 7) % len(of)] for name, of in texts.items()}
        present = [f'"{name}":{text}' for name, text in fields.items() if text is not None]
        found[f"key_{n}"] = _joined("{}", present)
    return found


def differences(kinds, documents, rows, *, signs_of_zeros=True, limit=10):
    """Gives what differs between documents and the rows of a reader, as text."""
    told = [f"there is {key}" for key in rows.keys() ^ documents.keys()]
    for key in sorted(rows.keys() & documents.keys()):
        parsed = parse(documents[key])
        for name, kind in kinds.items():
            expected, found = kind.of(parsed.get(name)), kind.read(rows[key][name])
            if not signs_of_zeros:
                expected, found = map(without_signs_of_zeros, (expected, found))
            if expected != found:
                told.append(f"{key}.{name} {kind}: {_cut(expected)} is {_cut(found)}")
    return [*told[:limit], f"{len(told)} differences"] if told else []


def _cut(value):
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."
