// Sums and maxima over a team of TEAM neighbouring threads and over a workgroup of WG, where a team is a subgroup.
// All threads of a workgroup call them together. `team_begin` comes first, with local_invocation_index.
// implements: @team
// constants: TEAM, WG

var<private> thread: u32;
var<private> lane: u32;
var<private> team: u32;
var<workgroup> team_words: array<f32, WG / TEAM>;

fn team_begin(index: u32) {
    thread = index;
    lane = index % TEAM;
    team = index / TEAM;
}

fn team_sum(x: f32) -> f32 {
    return subgroupAdd(x);
}

fn team_max(x: f32) -> f32 {
    return subgroupMax(x);
}

fn group_sum(x: f32) -> f32 {
    let of_team = subgroupAdd(x);
    if (WG == TEAM) { return of_team; }
    workgroupBarrier();
    if (lane == 0u) { team_words[team] = of_team; }
    workgroupBarrier();
    if (WG / TEAM <= TEAM) { return subgroupAdd(select(0.0, team_words[lane % (WG / TEAM)], lane < WG / TEAM)); }
    var sum = 0.0;
    for (var i = 0u; i < WG / TEAM; i++) { sum += team_words[i]; }
    return sum;
}

fn group_max(x: f32) -> f32 {
    let of_team = subgroupMax(x);
    if (WG == TEAM) { return of_team; }
    workgroupBarrier();
    if (lane == 0u) { team_words[team] = of_team; }
    workgroupBarrier();
    if (WG / TEAM <= TEAM) { return subgroupMax(team_words[lane % (WG / TEAM)]); }
    var most = team_words[0];
    for (var i = 1u; i < WG / TEAM; i++) { most = max(most, team_words[i]); }
    return most;
}
