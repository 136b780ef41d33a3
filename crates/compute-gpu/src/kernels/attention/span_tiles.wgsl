// Tiles of queries of any sequences whose KV caches are in one arena: their table in `words`, from
// offset `table` on.

@group(0) @binding(2) var<storage, read> words: array<u32>;

// `kv_start`: start of the cache in the arena, in vectors of 16 bytes. `position`: that of the
// first row of the sequence. `v_offset`: offset of the values in the cache, in elements.
// `first_row`: first row of the sequence in the views. `first`: first query of the tile in its
// sequence.
struct SpanTile {
    kv_start: u32, position: u32, capacity: u32, v_offset: u32, first_row: u32, rows: u32, first: u32,
}

const TILE_WORDS = 7u;

fn span_tile_at(table: u32, i: u32) -> SpanTile {
    let entry = table + i * TILE_WORDS;
    return SpanTile(
        words[entry], words[entry + 1u], words[entry + 2u], words[entry + 3u],
        words[entry + 4u], words[entry + 5u], words[entry + 6u],
    );
}
