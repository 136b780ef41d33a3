// Reductions over a team of TEAM neighbouring threads and over a workgroup of WG. A team is a
// subgroup. All threads of a workgroup call these together. `team_begin` comes first, with
// local_invocation_index.
// implements: @team
// constants: TEAM, WG

var<private> thread: u32;
var<private> lane: u32;
var<private> team: u32;
var<workgroup> team_values: array<f32, WG / TEAM>;

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
    let team_value = subgroupAdd(x);
    if (WG == TEAM) { return team_value; }
    workgroupBarrier();
    if (lane == 0u) { team_values[team] = team_value; }
    workgroupBarrier();
    if (WG / TEAM <= TEAM) { return subgroupAdd(select(0.0, team_values[lane % (WG / TEAM)], lane < WG / TEAM)); }
    var sum = 0.0;
    for (var i = 0u; i < WG / TEAM; i++) { sum += team_values[i]; }
    return sum;
}

fn group_max(x: f32) -> f32 {
    let team_value = subgroupMax(x);
    if (WG == TEAM) { return team_value; }
    workgroupBarrier();
    if (lane == 0u) { team_values[team] = team_value; }
    workgroupBarrier();
    if (WG / TEAM <= TEAM) { return subgroupMax(team_values[lane % (WG / TEAM)]); }
    var maximum = team_values[0];
    for (var i = 1u; i < WG / TEAM; i++) { maximum = max(maximum, team_values[i]); }
    return maximum;
}
