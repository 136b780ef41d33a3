// Segments of consecutive workgroups: a table in `words`, from offset `table` on, SEGMENT_WORDS
// words each, the first of which is the first workgroup of the segment. The kernel declares
// `words`.
// constants: SEGMENT_WORDS

// Offset in `words` of the entry of a workgroup: the last segment that starts at it or before.
fn segment_entry(table: u32, segments: u32, group: u32) -> u32 {
    var found = 0u;
    var end = segments;
    while (end - found > 1u) {
        let middle = (found + end) / 2u;
        if (words[table + middle * SEGMENT_WORDS] <= group) { found = middle; } else { end = middle; }
    }
    return table + found * SEGMENT_WORDS;
}
