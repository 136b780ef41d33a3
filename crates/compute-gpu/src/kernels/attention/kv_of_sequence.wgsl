// KV cache of one sequence, whose rows are consecutive positions. K and V that are not in the cache
// yet are those of a single row.
// implements: @kv

@group(0) @binding(1) var<storage, read_write> kv_cache: array<vec4<u32>>;

struct KvRow { position: u32, capacity: u32, v_offset: u32, k: u32, v: u32, table: u32 }

fn kv_row_at(row: u32) -> KvRow {
    return KvRow(p.splits.position + row, p.capacity, p.v_offset, p.k, p.v, p.table);
}

fn load_kv(i: u32) -> vec4<u32> { return kv_cache[i]; }

fn load_kv_word(i: u32, c: u32) -> u32 { return kv_cache[i][c]; }

fn store_kv(i: u32, vec: vec4<u32>) { kv_cache[i] = vec; }
