//! `devices`: lists processor and graphics adapters.

use std::process::ExitCode;

use moeflux::runtime::{Adapter, AdapterKind, Devices};
use moeflux_bench::{table::Table, units};
use serde::Serialize;

use crate::{args::DevicesArgs, out};

/// Report of all devices. Sizes are bytes.
#[derive(Serialize)]
struct DeviceReport {
    cpu: ProcessorInfo,
    adapters: Vec<AdapterInfo>,
    /// Value of `--device` that `auto` selects for a model that fits.
    preferred: String,
}

#[derive(Serialize)]
struct ProcessorInfo {
    isa: &'static str,
    threads: usize,
    /// Memory that the process may still allocate.
    memory_available: u64,
}

#[derive(Serialize)]
struct AdapterInfo {
    /// Value for `--device`.
    device: String,
    name: String,
    backend: String,
    kind: &'static str,
    driver: String,
    memory: Option<u64>,
    max_buffer: u64,
    max_binding: u64,
    subgroup: Option<(u32, u32)>,
    f16: bool,
    cooperative_matrix: bool,
    /// Reason why it cannot be used.
    unusable: Option<String>,
}

impl From<Adapter> for AdapterInfo {
    fn from(adapter: Adapter) -> Self {
        let Adapter { name, backend, driver, memory, max_buffer, max_binding, .. } = adapter;
        let Adapter { subgroup, f16, cooperative_matrix, unusable, .. } = adapter;
        let kind = match adapter.kind {
            AdapterKind::Discrete => "discrete",
            AdapterKind::Integrated => "integrated",
            AdapterKind::Virtual => "virtual",
            AdapterKind::Software => "software",
            AdapterKind::Other => "other",
        };
        let device = format!("gpu:{}", adapter.index);
        Self {
            device,
            name,
            backend,
            kind,
            driver,
            memory,
            max_buffer,
            max_binding,
            subgroup,
            f16,
            cooperative_matrix,
            unusable,
        }
    }
}

/// Runs `moeflux devices`.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn run(args: &DevicesArgs) -> anyhow::Result<ExitCode> {
    let devices = Devices::now();
    let report = DeviceReport {
        cpu: ProcessorInfo {
            isa: devices.isa,
            threads: devices.threads,
            memory_available: devices.memory.available,
        },
        preferred: devices.preferred.map_or("cpu".to_owned(), |index| format!("gpu:{index}")),
        adapters: devices.adapters.into_iter().map(AdapterInfo::from).collect(),
    };
    match args.json {
        true => out::json(&report)?,
        false => out::write(report)?,
    }
    Ok(ExitCode::SUCCESS)
}

impl std::fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut cpu = Table::new(2);
        cpu.row(["cpu", "the processor"]);
        cpu.row([
            "",
            &format!("{}, {}", self.cpu.isa, units::plural(self.cpu.threads as u64, "thread")),
        ]);
        cpu.row([
            "",
            &format!("{} of memory may be used", units::memory(self.cpu.memory_available)),
        ]);
        write!(f, "{cpu}")?;
        for a in &self.adapters {
            writeln!(f, "\n{a}")?;
        }
        if self.adapters.is_empty() {
            writeln!(f, "\nno graphics adapter: no driver (Vulkan, Metal, DX12) offers one")?;
        }
        let (preferred, model) = (&self.preferred, "for a model whose dense weights fit it");
        match preferred.as_str() {
            "cpu" => writeln!(f, "\n--device auto takes cpu"),
            _ => writeln!(f, "\n--device auto takes {preferred} {model}, else cpu"),
        }?;
        let is_card = |a: &&AdapterInfo| a.unusable.is_none() && a.kind == "discrete";
        let cards: Vec<&str> = self.adapters.iter().filter(is_card).map(|a| &*a.device).collect();
        match cards.len() {
            0 | 1 => Ok(()),
            _ => writeln!(f, "--device {} divides a model's layers among them", cards.join(",")),
        }
    }
}

impl std::fmt::Display for AdapterInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new(2);
        table.row([&self.device, &self.name]);
        table.row(["", &format!("{}, {}, driver {}", self.kind, self.backend, self.driver)]);
        let memory = self
            .memory
            .map_or("memory of unknown size".to_owned(), |m| units::memory(m) + " of memory");
        let (buffer, binding) = (units::memory(self.max_buffer), units::memory(self.max_binding));
        table.row(["", &format!("{memory}; buffers up to {buffer}, bindings up to {binding}")]);
        let has = |yes: bool, what: &str| if yes { what.to_owned() } else { format!("no {what}") };
        let subgroups = match self.subgroup {
            Some((least, most)) if least == most => format!("subgroups of {least}"),
            Some((least, most)) => format!("subgroups of {least} to {most}"),
            None => "no subgroups".to_owned(),
        };
        let matrices = has(self.cooperative_matrix, "cooperative matrices");
        table.row(["", &format!("{subgroups}, {}, {matrices}", has(self.f16, "f16"))]);
        if let Some(why) = &self.unusable {
            table.row(["", &format!("cannot be used: {why}")]);
        }
        write!(f, "{}", table.to_string().trim_end())
    }
}
