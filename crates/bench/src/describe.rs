//! Sentences about devices, memory and disks that several reports share.

use moeflux::{
    MemoryPlan,
    experts::{DiskSpeed, ExpertTimes},
    runtime::{ChosenDevice, Pool},
};

use crate::units;

/// The device that computed and why it was chosen, so that a fallback is never mistaken for a
/// result.
pub fn device(device: &ChosenDevice, dispatches: u64) -> String {
    let ChosenDevice { name, graphics, reason, .. } = device;
    match graphics {
        true => format!("on {name}, {} ({reason})", units::plural(dispatches, "GPU dispatch")),
        false => format!("on {name} ({reason})"),
    }
}

/// Peak memory of the host and, with a discrete GPU, planned memory of the GPU. A `peak` of 0 is
/// unknown: a container without `/proc`.
pub fn peak_memory(plan: &MemoryPlan, peak: u64) -> String {
    let budget = units::memory(plan.host().budget);
    let host = match peak {
        0 => format!("peak memory unknown, budget {budget}"),
        peak => format!("peak memory {} of {budget}", units::memory(peak)),
    };
    let of_card =
        |card: &Pool| format!("{} of {}", units::memory(card.total()), units::memory(card.budget));
    match plan.cards() {
        [] => host,
        [card] => format!("{host}, on the card {}", of_card(card)),
        cards => format!(
            "{host}, on the cards {}",
            cards.iter().map(of_card).collect::<Vec<_>>().join(" and ")
        ),
    }
}

/// Division of the experts in host memory beside a discrete GPU, and the speeds that it follows
/// from.
pub fn division(plan: &MemoryPlan, times: &ExpertTimes) -> String {
    let [host, bus] = [times.host_bytes_per_second(), times.bus_bytes_per_second()];
    let (host, bus) = (units::speed(host), units::speed(bus));
    match plan.experts_number() {
        Some(number) => format!(
            "of the experts in host memory, the processor computes {}, at {host}, and the GPU reads the others, at {bus}: plan {number}",
            plan.computed_on_host(),
        ),
        None => format!(
            "the GPU reads all experts in host memory, at {bus}: the processor, which computes them at {host}, would not make a token 10 % faster"
        ),
    }
}

/// Peak of a disk: `1.18 GB/s in blocks of 2.7 MB, 8 at once (measured 2 days ago)`.
pub fn disk_speed(disk: &DiskSpeed) -> String {
    format!(
        "{} in blocks of {}, {} at once{} (measured {})",
        units::speed(disk.ceiling()),
        units::disk(disk.block as f64),
        disk.best().map_or(0, |b| b.depth),
        if disk.direct {
            ""
        } else {
            ", through the page cache as this file system has no direct reads"
        },
        units::ago(disk.age())
    )
}
