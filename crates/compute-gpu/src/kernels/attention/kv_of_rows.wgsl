// KV caches of rows of any sequences, in one arena. The parameter `table` is the offset in `words`
// of their table.
// implements: @kv
// needs: attention/row_table

@group(0) @binding(1) var<storage, read_write> arena: array<vec4<u32>>;

struct KvRow { position: u32, capacity: u32, v_offset: u32, k: u32, v: u32, table: u32 }

var<private> kv_start: u32;

fn kv_row_at(row: u32) -> KvRow {
    kv_start = row_kv_start(p.table, row);
    return KvRow(
        row_position(p.table, row), row_capacity(p.table, row), row_v_offset(p.table, row),
        row_word(p.table, row, 4u), row_word(p.table, row, 5u), row_word(p.table, row, 6u),
    );
}

fn load_kv(i: u32) -> vec4<u32> { return arena[kv_start + i]; }

fn load_kv_word(i: u32, c: u32) -> u32 { return arena[kv_start + i][c]; }

fn store_kv(i: u32, vec: vec4<u32>) { arena[kv_start + i] = vec; }
