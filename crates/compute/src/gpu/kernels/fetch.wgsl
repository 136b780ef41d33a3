// x on its way into workgroup memory, number by number through `x_put`: each thread asks for eight before it waits for one.

fn fetch(at: u32) {
    for (var first = thread; first < COLS; first += 8u * WG) {
        let i = vec4<u32>(first, first + WG, first + 2u * WG, first + 3u * WG);
        let j = i + vec4<u32>(4u * WG);
        let m = min(i, vec4<u32>(COLS - 1u));
        let n = min(j, vec4<u32>(COLS - 1u));
        let x0 = a[at + m.x];
        let x1 = a[at + m.y];
        let x2 = a[at + m.z];
        let x3 = a[at + m.w];
        let x4 = a[at + n.x];
        let x5 = a[at + n.y];
        let x6 = a[at + n.z];
        let x7 = a[at + n.w];
        // Numbers behind the end come to lie where the last one does, which they are.
        x_put(m.x, x0);
        x_put(m.y, x1);
        x_put(m.z, x2);
        x_put(m.w, x3);
        x_put(n.x, x4);
        x_put(n.y, x5);
        x_put(n.z, x6);
        x_put(n.w, x7);
    }
    workgroupBarrier();
}
