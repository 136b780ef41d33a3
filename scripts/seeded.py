"""Random weights from seeds: a recipe of a few lines stands for the tensors of a checkpoint.

`weights.json` of a golden is the recipe; crates/goldens writes the same files in Rust:

  seed    of all tensors
  files   `name`, `sha256` of the whole file, `metadata` of its header, `tensors` as a tree of the
          parts of their names, and `order`: that of their bytes, as indices of the sorted names;
          without it they are sorted. A tensor is `DTYPE[SHAPE]` and one of

          L..HpE        integers of equal probability from L to H times 2^E, in the tensor's dtype
                        or, for packed bytes, `as DTYPE`: rounded to nearest, ties to even. At the
                        end `+` or `-`: the value times that and times the random sign of the
                        module, so that the scale and bias of a block have opposite signs
          words         random bits
          values V ...  the integers themselves

In Python a recipe has a list of dicts instead of the tree, in the order of the bytes: `name`, `dtype`,
`shape`, `uniform` [L, H, E], `words` None or `values`, `code` and `sign` if there are.

Word i (from 0) of a tensor is the SplitMix64 output of the state (h ^ seed) + (i + 1) * STEP, where
h is the first 8 bytes, little-endian, of the SHA-256 of its name. An integer takes the upper 32 bits
u: lowest + (u * (highest - lowest + 1) >> 32). A sign is the top bit of word i of the module's name.
The header has its names in order and no padding, so that tensors are not aligned.
"""
import filecmp
import hashlib
import json
import math
import re
import shutil
import struct
from pathlib import Path

import numpy as np

RECIPE, INDEX = "weights.json", "model.safetensors.index.json"
# The tokenizer of goldens without one: byte-level, 258 tokens.
TOKENIZER = Path(__file__).resolve().parent.parent / "crates/moeflux/tests/data/goldens/tokenizer"
STEP = 0x9E3779B97F4A7C15
SIZES = dict(F32=4, F16=2, BF16=2, F8_E4M3=1, F8_E8M0=1, U8=1, I8=1, U32=4, I32=4, I64=8)
# Bits of exponent and mantissa.
FLOATS = dict(F32=(8, 23), BF16=(8, 7), F16=(5, 10), F8_E4M3=(4, 3))
# Bits of a measured range of values.
FINE = 15
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Names of scales, and of the packed matrix that they belong to.
PACKED = {".scales": ".weight", "_scales": "_blocks", ".weight_scale": ".weight_packed"}
# Ranges of random scales and biases, relative to their mean.
SCALES, BIASES = (0.7, 1.3), (0.8, 1.2)


# --- from a recipe to files -----------------------------------------------------------------------


def words(name, seed, count):
    """The first `count` random words of a tensor: u64 [count]."""
    (h,) = struct.unpack("<Q", hashlib.sha256(name.encode()).digest()[:8])
    with np.errstate(over="ignore"):
        z = np.uint64(h ^ seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(STEP)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def encode(values, exponent, form):
    """Bits, i64 [n], of integers times 2^exponent in a float format: to nearest, ties to even."""
    e_bits, m_bits = FLOATS[form]
    bias, size = 2 ** (e_bits - 1) - 1, np.abs(values)
    power = np.maximum(np.frexp(size.astype(np.float64))[1] - 1 + exponent, 1 - bias).astype(np.int64)
    shift = power - m_bits - exponent
    up, down = np.maximum(-shift, 0), np.clip(shift, 0, 62)
    kept = (size << up) >> down
    rest, half = size - ((size >> down) << down), (np.int64(1) << down) >> 1
    kept += (down > 0) & ((rest > half) | ((rest == half) & (kept & 1 == 1)))
    bits = ((power + bias) << m_bits) + kept - (1 << m_bits)
    return np.where(size == 0, 0, bits) + (np.where(values < 0, 1, 0) << (e_bits + m_bits))


def tensor_bytes(tensor, seed):
    """The bytes of a recipe's tensor."""
    dtype, name = tensor["dtype"], tensor["name"]
    size = math.prod(tensor["shape"]) * SIZES[dtype]
    if "values" in tensor:
        return b"".join(v.to_bytes(SIZES[dtype], "little", signed=True) for v in tensor["values"])
    if "words" in tensor:
        return words(name, seed, -(-size // 8)).astype("<u8").tobytes()[:size]
    form = tensor.get("code", dtype)
    lowest, highest, exponent = tensor["uniform"]
    count = size // SIZES[form]
    random = words(name, seed, count) >> np.uint64(32)
    values = lowest + (random * np.uint64(highest - lowest + 1) >> np.uint64(32)).astype(np.int64)
    if "sign" in tensor:
        module = words(name.rpartition(".")[0], seed, count) >> np.uint64(63)
        values *= tensor["sign"] * (1 - 2 * module.astype(np.int64))
    bits = encode(values, exponent, form) if form in FLOATS else values
    return bits.astype(f"<i{8}").view(np.uint8).reshape(-1, 8)[:, : SIZES[form]].tobytes()


def file_bytes(file, seed):
    """A safetensors file of a recipe."""
    header, data, end = {"__metadata__": file["metadata"]} if file["metadata"] else {}, [], 0
    for tensor in file["tensors"]:
        data.append(tensor_bytes(tensor, seed))
        begin, end = end, end + len(data[-1])
        header[tensor["name"]] = dict(dtype=tensor["dtype"], shape=tensor["shape"], data_offsets=[begin, end])
    text = json.dumps(dict(sorted(header.items())), separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data)


def write(recipe, folder):
    """Writes the weights of a recipe; notes the digest of a file without one, and checks others."""
    for file in recipe["files"]:
        data = file_bytes(file, recipe["seed"])
        digest = hashlib.sha256(data).hexdigest()
        if file.setdefault("sha256", digest) != digest:
            raise SystemExit(f"{file['name']}: not the weights of which the recipe has the digest")
        (folder / file["name"]).write_bytes(data)


def lay_tokenizer(folder):
    """Copies the tokenizer of goldens to a folder."""
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)


def index_of(recipe):
    """The index of a recipe's files."""
    tensors = [(tensor, file["name"]) for file in recipe["files"] for tensor in file["tensors"]]
    sizes = [math.prod(tensor["shape"]) * SIZES[tensor["dtype"]] for tensor, _ in tensors]
    return dict(metadata=dict(total_size=sum(sizes)),
                weight_map={tensor["name"]: name for tensor, name in tensors})


def whole(folder, out):
    """Copies a golden to `out`, with its tokenizer and the weights of its recipe. Returns `out`."""
    lay_tokenizer(out)
    shutil.copytree(folder, out, dirs_exist_ok=True)
    if (folder / RECIPE).exists():
        recipe = load(folder)
        write(recipe, out)
        if len(recipe["files"]) > 1:
            (out / INDEX).write_text(json.dumps(index_of(recipe), indent=1, sort_keys=True))
    return out


def store(work, folder, recipe=None):
    """Copies what `work` holds to a golden, except what `whole` adds."""
    folder.mkdir(parents=True, exist_ok=True)
    if recipe:
        save(recipe, folder)
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
    for file in work.iterdir():
        usual = TOKENIZER / file.name
        added = recipe and file.match("model*.safetensors*") or usual.exists() and filecmp.cmp(file, usual, shallow=False)
        if not added:
            shutil.copy(file, folder / file.name)


def text_of(tensor):
    """A tensor of a recipe without its name, as a line of the tree."""
    rest = {k: v for k, v in tensor.items() if k not in ("name", "dtype", "shape", "code", "sign")}
    ((kind, values),) = rest.items()
    words = [tensor["dtype"] + json.dumps(tensor["shape"], separators=(",", ":"))]
    words += ["{}..{}p{}".format(*values)] if kind == "uniform" else [kind, *map(str, values or [])]
    words += ["as", tensor["code"]] if "code" in tensor else []
    words += ["+" if tensor["sign"] > 0 else "-"] if "sign" in tensor else []
    return " ".join(words)


def tensor_of(name, text):
    """The inverse of `text_of`."""
    head, kind, *rest = text.split(" ")
    dtype, shape = re.fullmatch(r"(\w+)(\[.*\])", head).groups()
    tensor = dict(name=name, dtype=dtype, shape=json.loads(shape))
    if bounds := re.fullmatch(r"(-?\d+)\.\.(-?\d+)p(-?\d+)", kind):
        tensor["uniform"] = list(map(int, bounds.groups()))
        if rest[:1] == ["as"]:
            tensor["code"] = rest[1]
        if rest[-1:] in (["+"], ["-"]):
            tensor["sign"] = int(rest[-1] + "1")
    else:
        tensor[kind] = list(map(int, rest)) or None
    return tensor


def tree_of(tensors):
    """The tree of (name, text). A module with one child has a name with it."""
    tree = {}
    for name, text in sorted(tensors):
        *modules, last = name.split(".")
        module = tree
        for part in modules:
            module = module.setdefault(part, {})
        module[last] = text

    def joined(module):
        """The module with the names of only children joined to those of their parents."""
        children = {}
        for name, child in module.items():
            child = joined(child) if isinstance(child, dict) else child
            if isinstance(child, dict) and len(child) == 1:
                ((last, child),) = child.items()
                name += "." + last
            children[name] = child
        return children

    return joined(tree)


def leaves(tree, prefix=""):
    """(name, text) of a tree's tensors."""
    for name, child in tree.items():
        yield from leaves(child, prefix + name + ".") if isinstance(child, dict) else [(prefix + name, child)]


def tree_text(tree, depth=1):
    """JSON of a tree: a line for each module of which no child is a module."""
    if not any(isinstance(child, dict) for child in tree.values()):
        return json.dumps(tree, separators=(",", ":"))
    lines = (" " * depth + f"{json.dumps(name)}:{tree_text(child, depth + 1) if isinstance(child, dict) else json.dumps(child)}"
             for name, child in tree.items())
    return "{\n" + ",\n".join(lines) + "}"


def load(folder):
    """The recipe of a golden."""
    recipe = json.loads((folder / RECIPE).read_text())
    for file in recipe["files"]:
        tensors = [tensor_of(*leaf) for leaf in sorted(leaves(file["tensors"]))]
        file["tensors"] = [tensors[i] for i in file.pop("order", range(len(tensors)))]
    return recipe


def save(recipe, folder):
    """Writes the recipe."""
    files = []
    for file in recipe["files"]:
        names = [tensor["name"] for tensor in file["tensors"]]
        place = {name: i for i, name in enumerate(sorted(names))}
        head = {k: v for k, v in file.items() if k != "tensors"}
        if names != sorted(names):
            head["order"] = [place[name] for name in names]
        tree = tree_text(tree_of((tensor["name"], text_of(tensor)) for tensor in file["tensors"]))
        files.append(f'{json.dumps(head, separators=(",", ":"))[:-1]},"tensors":{tree}}}')
    (folder / RECIPE).write_text(f'{{"seed":{recipe["seed"]},"files":[\n' + ",\n".join(files) + "\n]}\n")


# --- from files to a recipe -----------------------------------------------------------------------


def tensors_of(path):
    """(metadata, name -> (dtype, shape, bytes) in the order of the bytes) of a safetensors file."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    metadata = header.pop("__metadata__", None)
    inside = lambda entry: data[8 + n + entry["data_offsets"][0] : 8 + n + entry["data_offsets"][1]]
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return metadata, {name: (e["dtype"], e["shape"], inside(e)) for name, e in entries}


def decode(data, form):
    """f64 values of bytes in a float format (the inverse of `encode`)."""
    e_bits, m_bits = FLOATS[form]
    size = SIZES[form]
    bits = np.frombuffer(data, f"<u{size}").astype(np.int64)
    exponent, mantissa = bits >> m_bits & (2**e_bits - 1), bits & (2**m_bits - 1)
    normal, bias = exponent > 0, 2 ** (e_bits - 1) - 1
    value = np.ldexp((mantissa + np.where(normal, 1 << m_bits, 0)).astype(np.float64),
                     np.maximum(exponent, 1) - bias - m_bits)
    return np.where(bits >> (e_bits + m_bits), -value, value)


def span(lowest, highest, exponent=None):
    """The recipe's range of real numbers."""
    if exponent is None:
        exponent = math.floor(math.log2(max(highest - lowest, abs(highest)))) - FINE - 1
    return [round(v * 2.0**-exponent) for v in (lowest, highest)] + [exponent]


def uniform(values, positive=False, exponent=None):
    """The recipe's range with the mean and standard deviation of `values`."""
    mean, spread = float(values.mean()), float(values.std())
    if spread == 0:
        mantissa, exponent = math.frexp(mean)
        whole = int(mantissa * 2**24)
        down = (whole & -whole).bit_length() - 1 if whole else 0
        return [whole >> down, whole >> down, exponent - 24 + down]
    if not positive and abs(mean) < 3 * spread / math.sqrt(values.size):
        mean = 0.0
    half = math.sqrt(3) * spread
    return span(max(mean - half, mean / 4) if positive else mean - half, mean + half, exponent)


def fields(data, bits):
    """Unsigned integers of `bits` bits, from the lowest ones of the first byte on."""
    flags = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return flags.reshape(-1, bits) @ (1 << np.arange(bits))


def packed_rules(packed, scales, biases):
    """How a recipe fills a quantized matrix, and its scales and biases: (rule, rule, rule or None).
    Random codes have a wider spread than quantized normal values, so the scales are such that the
    values have the standard deviation of those of the template."""
    kind, _, data = scales
    per_scale = lambda codes: codes.reshape(len(data) // SIZES[kind], -1)
    if biases:
        scale, bias = (decode(t[2], t[0])[:, None] for t in (scales, biases))
        bits = min((2, 3, 4, 5, 6, 8), key=lambda b: abs(math.log(2 * np.abs(bias / scale).mean() / (2**b - 1))))
        top = 2**bits - 1
        spread = (per_scale(fields(packed[2], bits)) * scale + bias).std()
        scale = spread / math.sqrt((top * top + 2 * top) / 12)
        return (dict(words=None), dict(uniform=span(*(scale * r for r in SCALES)), sign=1),
                dict(uniform=span(*(scale * top / 2 * r for r in BIASES)), sign=-1))
    codes = fields(packed[2], 4)
    if kind in ("U8", "F8_E8M0") and len(packed[2]) > 8 * len(data):
        words = dict(words=None)
        if len(packed[2]) == 32 * len(data):
            # Random bits would have NaN among them.
            values = decode(packed[2], "F8_E4M3")
            words, rms = dict(uniform=uniform(values), code="F8_E4M3"), values.std()
        else:
            values, rms = E2M1[codes & 7] * (1 - 2 * (codes >> 3)), math.sqrt((E2M1**2).mean())
        spread = (per_scale(values) * 2.0 ** (np.frombuffer(data, np.uint8)[:, None] - 127.0)).std()
        # Three powers of two.
        highest = round(math.log2(spread / rms / math.sqrt((1 + 1 / 4 + 1 / 16) / 3))) + 127
        return words, dict(uniform=[highest - 2, highest, 0]), None
    if kind in ("U8", "F8_E4M3"):
        code = dict(code="F8_E4M3") if kind == "U8" else {}
        values, rms, scale = E2M1[codes & 7] * (1 - 2 * (codes >> 3)), math.sqrt((E2M1**2).mean()), decode(data, "F8_E4M3")
    else:
        code, values, rms, scale = {}, codes - 8, math.sqrt((np.arange(-8, 8) ** 2).mean()), decode(data, kind)
    scale = (per_scale(values) * scale[:, None]).std() / rms
    return dict(words=None), dict(uniform=span(*(scale * r for r in SCALES)), **code), None


def rule(name, dtype, data, others):
    """How a recipe fills a tensor, measured on one from elsewhere. `others`: the checkpoint's
    tensors."""
    for scales, matrix in PACKED.items():
        for i, end in enumerate((matrix, scales, ".biases")):
            stem = name.removesuffix(end)
            if name.endswith(end) and stem + scales in others and stem + matrix in others:
                return packed_rules(others[stem + matrix], others[stem + scales], others.get(stem + ".biases"))[i]
    if dtype not in FLOATS:
        values = np.frombuffer(data, f"<i{SIZES[dtype]}")
        if dtype in ("I32", "U32", "U8", "I8") and name.endswith(("weight", "zeros")):
            return dict(words=None)
        if len(values) > 1024:
            raise SystemExit(f"{name}: a table of {len(values)} integers has no recipe; keep the weights")
        return dict(values=values.tolist())
    values = decode(data, dtype)
    if name.endswith("norm.weight") and abs(values.mean()) < 0.5:
        # Stored without the 1, which mlx-lm adds in the tensor's dtype: the sum must be exact.
        return dict(uniform=uniform(values, exponent=-FLOATS[dtype][1]))
    return dict(uniform=uniform(values, positive="scale" in name.rpartition(".")[2]))


def measure(folder):
    """The recipe of a folder's weights, without seed and digests: the same tensors in the same
    files, random with the same mean and standard deviation."""
    paths = sorted(folder.glob("model*.safetensors"))
    contents = [tensors_of(path) for path in paths]
    others = {name: tensor for _, tensors in contents for name, tensor in tensors.items()}
    files = []
    for path, (metadata, tensors) in zip(paths, contents):
        recipes = [dict(name=name, dtype=dtype, shape=shape) | rule(name, dtype, data, others)
                   for name, (dtype, shape, data) in tensors.items()]
        files.append(dict(name=path.name, metadata=metadata, tensors=recipes))
    return dict(files=files)
