// Uses that are known before the dispatch: behind slot.wgsl.

struct Ranking { none: u32 }

fn find(i: u32) -> Use { return use_of(p.uses, i); }

fn note(group: u32) {}
