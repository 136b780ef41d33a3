// x on its way into workgroup memory, number by number through `x_put`: each thread asks for eight before it waits for one.
//
// NORM: RMSNorm(x) = x w / sqrt(mean(x^2) + eps) instead, of which x w is brought; `x_factor` gives the rest.

var<private> squares: f32;

// `w`: where the norm's weights begin.
fn fetch(at: u32, w: u32) {
    for (var first = thread; first < X_COLS; first += 8u * WG) {
        let i = vec4<u32>(first, first + WG, first + 2u * WG, first + 3u * WG);
        let j = i + vec4<u32>(4u * WG);
        let m = min(i, vec4<u32>(X_COLS - 1u));
        let n = min(j, vec4<u32>(X_COLS - 1u));
        var x = vec4<f32>(a[at + m.x], a[at + m.y], a[at + m.z], a[at + m.w]);
        var y = vec4<f32>(a[at + n.x], a[at + n.y], a[at + n.z], a[at + n.w]);
        if (NORM == 1u) {
            let of_x = vec4<f32>(a[w + m.x], a[w + m.y], a[w + m.z], a[w + m.w]);
            let of_y = vec4<f32>(a[w + n.x], a[w + n.y], a[w + n.z], a[w + n.w]);
            squares += dot(select(vec4<f32>(), x * x, i < vec4<u32>(X_COLS)), vec4<f32>(1.0));
            squares += dot(select(vec4<f32>(), y * y, j < vec4<u32>(X_COLS)), vec4<f32>(1.0));
            x *= of_x;
            y *= of_y;
        }
        // Numbers behind the end come to lie where the last one does, which they are.
        x_put(m.x, x.x);
        x_put(m.y, x.y);
        x_put(m.z, x.z);
        x_put(m.w, x.w);
        x_put(n.x, y.x);
        x_put(n.y, y.y);
        x_put(n.z, y.z);
        x_put(n.w, y.w);
    }
    if (NORM == 1u) { squares = group_sum(squares); }
    workgroupBarrier();
}

fn x_factor(eps: f32) -> f32 {
    return 1.0 / sqrt(squares / f32(COLS) + eps);
}
