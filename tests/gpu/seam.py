"""libringattn_cuda.so by ctypes. The structs are made from the facts that the module prints about itself (layout.h), so that
there is no copy of them here that could go stale; a field that does not exist cannot be set."""

import ctypes as C

_NUMBERS = {
    "bool": C.c_bool,
    "char": C.c_char,
    "int": C.c_int,
    "int32_t": C.c_int32,
    "int64_t": C.c_int64,
    "uint64_t": C.c_uint64,
    "double": C.c_double,
    "ra_dtype": C.c_int,
    "ra_status": C.c_int,
}


class Struct(C.Structure):
    """A struct of the module. Python objects that must outlive it go into `keep`."""

    def __setattr__(self, name, value):
        if name != "keep" and name not in {field[0] for field in self._fields_}:
            raise AttributeError(f"{type(self).__name__} has no field {name}")
        super().__setattr__(name, value)


def _type_of(text, structs):
    """The ctypes type of a C type; pointers to what ctypes knows keep their type."""
    text = text.replace("const ", "").strip()
    if not text.endswith("*"):
        return structs.get(text) or _NUMBERS[text]
    inner = text[:-1].strip()
    if inner == "char":
        return C.c_char_p
    known = structs.get(inner) or _NUMBERS.get(inner) or (C.c_char_p if inner == "char *" else None)
    return C.POINTER(known) if known else C.c_void_p


def _arguments(text):
    """(type, name) of the parameters in "(const ra_problem *problem, bool single)"; none in "(void)"."""
    found, text = [], text.strip("()")
    for part in text.split(",") if text != "void" else ():
        kind, _, name = part.strip().rpartition(" ")
        found.append((kind + "*" * name.count("*"), name.strip("*")))
    return found


class Seam:
    """A module: `structs` and `numbers` by their C names, and its functions as attributes, without ra_cuda_backend_."""

    def __init__(self, path):
        self.library = C.CDLL(path)
        layout = self.library.ra_cuda_backend_layout
        layout.argtypes, layout.restype = [C.c_char_p, C.c_int64], C.c_int64
        text = C.create_string_buffer(layout(None, 0) + 1)
        layout(text, len(text))
        self.structs, self.numbers, self.parameters = {}, {}, {}
        self._read(text.value.decode().splitlines())

    def _read(self, lines):
        fields, sizes = {}, {}
        for what, *words in map(str.split, lines):
            if what == "struct":
                fields[words[0]], sizes[words[0]] = [], int(words[1])
            elif what == "field":
                fields[words[0]].append((words[1], " ".join(words[2:-2]), int(words[-2]), int(words[-1])))
            elif what == "number":
                self.numbers[words[0]] = int(words[1])
        for name in fields:  # those that a struct holds stand before it
            self._make_struct(name, fields[name], sizes[name])
        for line in lines:
            if line.startswith("function "):
                self._make_function(line)

    def _make_struct(self, name, fields, size):
        made = []
        for field, kind, _, length in fields:
            one = _type_of(kind, self.structs)
            made.append((field, one if length == C.sizeof(one) else one * (length // C.sizeof(one))))
        struct = type(name, (Struct,), {"_fields_": made})
        for field, _, offset, length in fields:
            found = getattr(struct, field)
            if (found.offset, found.size) != (offset, length):
                raise TypeError(f"{name}.{field} is at {found.offset} ({found.size} bytes), not at {offset} ({length} bytes)")
        if C.sizeof(struct) != size:
            raise TypeError(f"{name} has {C.sizeof(struct)} bytes, not {size}: layout.h lacks a field")
        self.structs[name] = struct

    def _make_function(self, line):
        head, _, arguments = line.partition("(")
        _, name, result = head.split(None, 2)
        self.parameters[name] = _arguments(arguments)
        function = getattr(self.library, "ra_cuda_backend_" + name)
        function.argtypes = [_type_of(kind, self.structs) for kind, _ in self.parameters[name]]
        function.restype = None if result.strip() == "void" else _type_of(result, self.structs)
        setattr(self, name, function)

    def call(self, name, *arguments):
        """Calls a function that takes an error last and returns a status; raises its sentence."""
        error = self.structs["ra_cuda_error"]()
        status = getattr(self, name)(*arguments, C.byref(error))
        if status != self.numbers["RA_OK"]:
            raise RuntimeError(f"status {status}: {error.text.decode()}")
