// KV caches of the sequences of rows, one row each, in one arena. The parameter `table` is the
// offset in `words` of their table. A row has the start of its cache in the arena, its position,
// the capacity of the cache, and the offsets of the values in the cache, of its K and V, and of its
// cosines and sines.
// implements: @kv

@group(0) @binding(1) var<storage, read_write> arena: array<vec4<u32>>;

const KV_ROW_WORDS = 7u;

struct KvRow { position: u32, capacity: u32, v_offset: u32, k: u32, v: u32, table: u32 }

var<private> kv_start: u32;

fn kv_row_at(row: u32) -> KvRow {
    let entry = p.table + row * KV_ROW_WORDS;
    kv_start = words[entry];
    return KvRow(
        words[entry + 1u], words[entry + 2u], words[entry + 3u], words[entry + 4u], words[entry + 5u], words[entry + 6u],
    );
}

fn load_kv(i: u32) -> vec4<u32> { return arena[kv_start + i]; }

fn load_kv_word(i: u32, c: u32) -> u32 { return arena[kv_start + i][c]; }

fn store_kv(i: u32, vec: vec4<u32>) { arena[kv_start + i] = vec; }
