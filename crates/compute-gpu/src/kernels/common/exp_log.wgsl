// exp and log to about the last bit. Drivers' own lose digits as the argument grows.

fn exp_of(x: f32) -> f32 {
    let y = clamp(x, -87.0, 88.0);
    let n = round(y * 1.442695);
    // ln 2 in two parts; the first times n is exact.
    let r = fma(n, 2.1219444e-4, fma(n, -0.69335938, y));
    var sum = 1.9875691e-4;
    sum = fma(sum, r, 1.3981999e-3);
    sum = fma(sum, r, 8.333452e-3);
    sum = fma(sum, r, 4.1665796e-2);
    sum = fma(sum, r, 0.16666666);
    sum = fma(sum, r, 0.5);
    sum = fma(sum, r * r, r) + 1.0;
    return sum * bitcast<f32>(u32(i32(n) + 127) << 23u);
}

// log(1 + t) for t in 0 .. 1, by the series of 2 atanh(t / (t + 2)).
fn log1p_of(t: f32) -> f32 {
    let s = t / (t + 2.0);
    let z = s * s;
    var sum = 1.0 / 13.0;
    sum = fma(sum, z, 1.0 / 11.0);
    sum = fma(sum, z, 1.0 / 9.0);
    sum = fma(sum, z, 1.0 / 7.0);
    sum = fma(sum, z, 0.2);
    sum = fma(sum, z, 1.0 / 3.0);
    return 2.0 * fma(sum, z * s, s);
}
