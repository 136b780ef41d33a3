// Reductions over a team of TEAM neighbouring threads and over a workgroup of WG, through
// workgroup memory, for adapters without subgroups. All threads of a workgroup call these
// together. `team_begin` comes first, with local_invocation_index.
// implements: @team
// constants: TEAM, WG

var<private> thread: u32;
var<private> lane: u32;
var<private> team: u32;
var<workgroup> team_values: array<f32, WG>;

fn team_begin(index: u32) {
    thread = index;
    lane = index % TEAM;
    team = index / TEAM;
}

fn team_sum(x: f32) -> f32 {
    workgroupBarrier();
    team_values[thread] = x;
    for (var distance = TEAM / 2u; distance > 0u; distance /= 2u) {
        workgroupBarrier();
        if (lane < distance) { team_values[thread] += team_values[thread + distance]; }
    }
    workgroupBarrier();
    return team_values[team * TEAM];
}

fn team_max(x: f32) -> f32 {
    workgroupBarrier();
    team_values[thread] = x;
    for (var distance = TEAM / 2u; distance > 0u; distance /= 2u) {
        workgroupBarrier();
        if (lane < distance) { team_values[thread] = max(team_values[thread], team_values[thread + distance]); }
    }
    workgroupBarrier();
    return team_values[team * TEAM];
}

fn group_sum(x: f32) -> f32 {
    let team_value = team_sum(x);
    var sum = 0.0;
    for (var i = 0u; i < WG; i += TEAM) { sum += team_values[i]; }
    return sum;
}

fn group_max(x: f32) -> f32 {
    let team_value = team_max(x);
    var maximum = team_values[0];
    for (var i = TEAM; i < WG; i += TEAM) { maximum = max(maximum, team_values[i]); }
    return maximum;
}
