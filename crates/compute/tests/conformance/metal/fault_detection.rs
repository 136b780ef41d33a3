//! Faults of kernels that the Metal emulation detects.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs two workgroups of 64 threads on a buffer with the values 0..128. Returns its contents
/// afterwards.
fn run(body: &str) -> Vec<u32> {
    let source = format!(
        "var<workgroup> shared_words: array<u32, 64>;
        @group(0) @binding(0) var<storage, read_write> a: array<u32>;
        @compute @workgroup_size(64)
        fn main(
            @builtin(workgroup_id) id: vec3<u32>,
            @builtin(local_invocation_index) i: u32,
            @builtin(subgroup_invocation_id) lane: u32,
        ) {{
            let at = id.x * 64u + i;
            {body}
        }}"
    );
    let adapters =
        pollster::block_on(super::instance(false).enumerate_adapters(wgpu::Backends::all()));
    let (device, queue) =
        pollster::block_on(adapters[0].request_device(&Default::default())).unwrap();
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some("kernel"),
        source: wgpu::ShaderSource::Wgsl(source.into()),
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: Some(&device.create_pipeline_layout(&Default::default())),
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions {
            zero_initialize_workgroup_memory: false,
            ..Default::default()
        },
        cache: None,
    });
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 128 * 4,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    let layout = device
        .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &[] });
    let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &layout,
        entries: &[wgpu::BindGroupEntry { binding: 0, resource: buffer.as_entire_binding() }],
    });
    let values: Vec<u32> = (0..128).collect();
    queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&values));
    let mut encoder = device.create_command_encoder(&Default::default());
    let mut pass = encoder.begin_compute_pass(&Default::default());
    pass.set_pipeline(&pipeline);
    pass.set_bind_group(0, &group, &[]);
    pass.dispatch_workgroups(2, 1, 1);
    drop(pass);
    queue.submit([encoder.finish()]);
    buffer.slice(..).map_async(wgpu::MapMode::Read, |_| {});
    let mapped = buffer.slice(..).get_mapped_range().unwrap();
    bytemuck::cast_slice(&mapped).to_vec()
}

/// Whether there is a C++ compiler; prints a line if not.
fn has_compiler() -> bool {
    let found = super::compile::has_compiler();
    if !found {
        eprintln!("not tested: there is no C++ compiler");
    }
    found
}

/// Checks that a kernel fails with a message that contains `expected`.
fn fails(body: &str, expected: &str) {
    let error = catch_unwind(AssertUnwindSafe(|| run(body))).unwrap_err();
    let error = error.downcast_ref::<String>().unwrap();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn simdgroup_operations() {
    if !has_compiler() {
        return;
    }
    let sums = run("a[at] = subgroupAdd(a[at]);");
    assert_eq!(sums[0], (0..32).sum::<u32>());
    assert_eq!(sums[127], (96..128).sum::<u32>());
    let swapped = run("a[at] = subgroupShuffleXor(a[at], 5u) + subgroupExclusiveAdd(1u) * 1000u;");
    assert_eq!(swapped[70], 67 + 6000);
    let all = run(
        "a[at] = subgroupMax(a[at]) + subgroupBallot(lane > 29u).x + subgroupBroadcast(a[at], 3u);",
    );
    assert_eq!(all[40], 63u32.wrapping_add(0xc000_0000) + 35);
    let halves = run("a[at] = pack2x16float(unpack2x16float(0x3c004000u) * 2.0);");
    assert_eq!(halves[5], 0x4000_4400);
}

#[test]
fn divergent_threads_are_detected() {
    if !has_compiler() {
        return;
    }
    fails("if (lane < 7u) { a[at] = subgroupAdd(1u); }", "wait at simd_sum");
    fails(
        "if (lane < 7u) { a[at] = subgroupAdd(1u); } else { a[at] = subgroupAdd(2u); }",
        "others at simd_sum",
    );
    fails("if (a[at] == 77u) { return; } workgroupBarrier();", "wait at threadgroup_barrier");
    // All threads of one simdgroup, but not of the workgroup.
    let sums = run("if (i < 32u) { a[at] = subgroupAdd(1u); }");
    assert_eq!(sums[..34], [vec![32; 32], vec![32, 33]].concat());
}

#[test]
fn missing_barriers_change_results() {
    if !has_compiler() {
        return;
    }
    let right =
        run("shared_words[i] = a[at]; workgroupBarrier(); a[at] = shared_words[(i + 1u) % 64u];");
    assert_eq!([right[0], right[63], right[64]], [1, 0, 65]);
    for next in [1, 63] {
        let wrong =
            run(&format!("shared_words[i] = a[at]; a[at] = shared_words[(i + {next}u) % 64u];"));
        assert!((0..128).any(|i| wrong[i] != (i / 64 * 64 + (i + next) % 64) as u32));
    }
    assert!(
        run("a[at] = shared_words[i];").iter().all(|word| *word == u32::MAX),
        "threadgroup memory is not poisoned"
    );
}

#[test]
fn writes_outside_a_buffer_are_detected() {
    if !has_compiler() {
        return;
    }
    fails("a[at + 1u] = 1u;", "outside of a buffer");
}

#[test]
fn matrices_of_16x16_are_rejected() {
    let kernel = "enable f16;
        enable wgpu_cooperative_matrix;
        @group(0) @binding(0) var<storage, read_write> a: array<f32>;
        @compute @workgroup_size(32)
        fn main() {
            var sum = coop_mat16x16<f32, C>();
            coopStoreT(sum, &a[0], 16u);
        }";
    let adapters =
        pollster::block_on(super::instance(false).enumerate_adapters(wgpu::Backends::all()));
    let (device, _) = pollster::block_on(adapters[0].request_device(&Default::default())).unwrap();
    let made = catch_unwind(AssertUnwindSafe(|| {
        let source = wgpu::ShaderSource::Wgsl(kernel.into());
        device.create_shader_module(wgpu::ShaderModuleDescriptor { label: None, source })
    }));
    let error = made.unwrap_err();
    let error = error.downcast_ref::<String>().unwrap();
    assert!(error.contains("matrices that Metal does not have"), "{error}");
}
