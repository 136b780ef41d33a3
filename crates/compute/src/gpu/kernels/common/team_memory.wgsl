// Sums and maxima over a team of TEAM neighbouring threads and over a workgroup of WG, by way of workgroup memory, for
// adapters without subgroups. All threads of a workgroup call them together. `team_begin` comes first, with
// local_invocation_index.
// implements: @team
// constants: TEAM, WG

var<private> thread: u32;
var<private> lane: u32;
var<private> team: u32;
var<workgroup> team_words: array<f32, WG>;

fn team_begin(index: u32) {
    thread = index;
    lane = index % TEAM;
    team = index / TEAM;
}

fn team_sum(x: f32) -> f32 {
    workgroupBarrier();
    team_words[thread] = x;
    for (var half = TEAM / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (lane < half) { team_words[thread] += team_words[thread + half]; }
    }
    workgroupBarrier();
    return team_words[team * TEAM];
}

fn team_max(x: f32) -> f32 {
    workgroupBarrier();
    team_words[thread] = x;
    for (var half = TEAM / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (lane < half) { team_words[thread] = max(team_words[thread], team_words[thread + half]); }
    }
    workgroupBarrier();
    return team_words[team * TEAM];
}

fn group_sum(x: f32) -> f32 {
    let of_team = team_sum(x);
    var sum = 0.0;
    for (var i = 0u; i < WG; i += TEAM) { sum += team_words[i]; }
    return sum;
}

fn group_max(x: f32) -> f32 {
    let of_team = team_max(x);
    var most = team_words[0];
    for (var i = TEAM; i < WG; i += TEAM) { most = max(most, team_words[i]); }
    return most;
}
