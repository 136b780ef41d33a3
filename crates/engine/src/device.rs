//! Which device computes: the one that was asked for, or the faster one for a model.

use moeflux_compute::{Adapter, AdapterKind, Device, DeviceOptions, Isa};

use crate::{
    Error,
    blueprint::Blueprint,
    memory::{MemoryPlan, MemoryRequest, host_budget},
    system::{SystemMemory, has_graphics, physical_cores},
};

/// Host memory that must be there before a graphics driver is loaded to choose by itself.
const DRIVER: u64 = 256 << 20;

/// Which device computes, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenDevice {
    /// What computes: "cpu, AVX-512 VNNI, 2 threads".
    pub name: String,
    /// The graphics adapter, where one computes.
    pub adapter: Option<String>,
    /// Why this one.
    pub reason: String,
}

/// An open device, and the plan that was made for it.
pub(crate) struct Opened {
    pub(crate) device: Box<dyn Device>,
    pub(crate) plan: MemoryPlan,
    pub(crate) chosen: ChosenDevice,
}

/// What could compute on this machine.
#[derive(Clone, Debug)]
pub struct Devices {
    /// The best instruction set of the processor.
    pub isa: &'static str,
    /// Threads that compute where nobody asks for another number.
    pub threads: usize,
    /// The host's memory.
    pub memory: SystemMemory,
    /// Graphics adapters, in the order of their numbers.
    pub adapters: Vec<Adapter>,
    /// Number of the adapter that `auto` takes for a model that fits it; without one it takes the processor.
    pub preferred: Option<usize>,
}

impl Devices {
    /// Asks the system. Loads the graphics drivers.
    pub fn now() -> Self {
        let adapters = moeflux_compute::adapters();
        let preferred = by_preference(&adapters).find(|a| is_hardware(a) && a.unusable.is_none());
        Self {
            isa: Isa::detect().name(),
            threads: physical_cores(),
            memory: SystemMemory::now(),
            preferred: preferred.map(|a| a.index),
            adapters,
        }
    }
}

/// Opens the device that was asked for, and plans for it. By the name `auto` it is the first adapter with a processor
/// of its own whose memory holds dense weights, states, scratch and the experts of one token; else the CPU. Never a
/// software adapter: that is the CPU, and slower.
///
/// # Errors
/// There is no such device, or the budget is below the floor.
pub(crate) fn open_device(
    blueprint: &Blueprint,
    request: &MemoryRequest,
    options: &DeviceOptions,
    wrap: Option<&(dyn Fn(Box<dyn Device>) -> Box<dyn Device> + Send)>,
) -> Result<Opened, Error> {
    let machine = Machine {
        graphics: has_graphics(),
        adapters: &moeflux_compute::adapters,
        open: &|name| {
            let threads = options.threads.or_else(|| Some(physical_cores()));
            let options = DeviceOptions { name: Some(name.to_owned()), threads, ..options.clone() };
            let device = moeflux_compute::open(&options).map_err(Error::at(|| "opening the device"))?;
            Ok(match wrap {
                Some(wrap) => wrap(device),
                None => device,
            })
        },
    };
    machine.choose(blueprint, request, options.name.as_deref().unwrap_or("cpu"))
}

/// What is asked of a machine; tests have others than theirs.
struct Machine<'a> {
    /// Whether it may have graphics hardware.
    graphics: bool,
    adapters: &'a dyn Fn() -> Vec<Adapter>,
    open: &'a dyn Fn(&str) -> Result<Box<dyn Device>, Error>,
}

impl Machine<'_> {
    fn choose(&self, blueprint: &Blueprint, request: &MemoryRequest, name: &str) -> Result<Opened, Error> {
        match name {
            "auto" => match self.first_that_fits(blueprint, request) {
                Ok(opened) => Ok(opened),
                Err(why_not) => self.open_as("cpu", None, blueprint, request, why_not),
            },
            _ if name == "gpu" || name.starts_with("gpu:") => {
                let adapter = named(name, (self.adapters)())?;
                self.open_as(
                    &format!("gpu:{}", adapter.index),
                    Some(&adapter),
                    blueprint,
                    request,
                    "asked for".into(),
                )
            }
            _ => self.open_as(name, None, blueprint, request, "asked for".into()),
        }
    }

    fn open_as(
        &self,
        name: &str,
        adapter: Option<&Adapter>,
        blueprint: &Blueprint,
        request: &MemoryRequest,
        reason: String,
    ) -> Result<Opened, Error> {
        let device = (self.open)(name)?;
        let plan = MemoryPlan::new(blueprint, request, &*device)?;
        let adapter = adapter.map(|a| a.name.clone());
        let chosen = ChosenDevice { name: device.describe(), adapter, reason };
        Ok(Opened { device, plan, chosen })
    }

    /// The first adapter that `auto` may take, open, or why there is none.
    fn first_that_fits(&self, blueprint: &Blueprint, request: &MemoryRequest) -> Result<Opened, String> {
        if !self.graphics {
            return Err("there is no graphics hardware".into());
        }
        // Loading a driver costs memory for good, so a small budget does not even ask what there is.
        let system = SystemMemory::now();
        if host_budget(request, &system) < system.resident + DRIVER {
            return Err("the memory budget has no room for a graphics driver".into());
        }
        let adapters = (self.adapters)();
        let mut why_not = Vec::new();
        for adapter in by_preference(&adapters).filter(|a| is_hardware(a)) {
            match self.try_adapter(adapter, blueprint, request) {
                Ok(opened) => return Ok(opened),
                Err(why) => why_not.push(format!("{}: {why}", adapter.name)),
            }
        }
        Err(match why_not.is_empty() {
            true => "there is no graphics hardware".into(),
            false => why_not.join("; "),
        })
    }

    fn try_adapter(
        &self,
        adapter: &Adapter,
        blueprint: &Blueprint,
        request: &MemoryRequest,
    ) -> Result<Opened, String> {
        if let Some(why) = &adapter.unusable {
            return Err(why.clone());
        }
        let working_set = blueprint.experts_per_token();
        let least = MemoryPlan::dense_bytes(blueprint) + blueprint.experts_per_token_bytes();
        let mib = |bytes: u64| bytes >> 20;
        if let Some(memory) = adapter.memory.filter(|memory| *memory < least) {
            let (has, needs) = (mib(memory), mib(least));
            return Err(format!("its {has} MiB are fewer than the {needs} that every token needs"));
        }
        let name = format!("gpu:{}", adapter.index);
        let opened = self.open_as(&name, Some(adapter), blueprint, request, String::new());
        let mut opened = opened.map_err(|error| error.to_string())?;
        let (slots, all) = (opened.plan.slots, blueprint.experts());
        if slots < working_set.min(all) {
            return Err(format!("it has room for {slots} experts, and one token needs {working_set}"));
        }
        opened.chosen.reason = match slots {
            _ if slots >= all => "it holds the whole model".into(),
            _ => format!("it holds the dense weights and {slots} of {all} experts"),
        };
        Ok(opened)
    }
}

/// Whether it is more than the processor by another name, or a share of who knows what.
fn is_hardware(adapter: &Adapter) -> bool {
    matches!(adapter.kind, AdapterKind::Discrete | AdapterKind::Integrated)
}

/// Cards first, software last; of one kind the one with the most memory.
fn by_preference(adapters: &[Adapter]) -> impl Iterator<Item = &Adapter> {
    let rank = |adapter: &Adapter| match adapter.kind {
        AdapterKind::Discrete => 0,
        AdapterKind::Integrated => 1,
        AdapterKind::Virtual => 2,
        AdapterKind::Other => 3,
        AdapterKind::Software => 4,
    };
    let mut all: Vec<&Adapter> = adapters.iter().collect();
    all.sort_by_key(|a| (rank(a), std::cmp::Reverse(a.memory), a.index));
    all.into_iter()
}

/// The adapter that `gpu` or `gpu:N` means: software too, as somebody asked for it.
fn named(name: &str, adapters: Vec<Adapter>) -> Result<Adapter, Error> {
    let index = name.strip_prefix("gpu:").map(str::parse::<usize>);
    let wanted = |a: &Adapter| match &index {
        None => true,
        Some(index) => index.as_ref().ok() == Some(&a.index),
    };
    if let Some(adapter) = by_preference(&adapters).find(|a| wanted(a) && a.unusable.is_none()) {
        return Ok(adapter.clone());
    }
    let found: Vec<String> = adapters
        .iter()
        .map(|a| {
            let state = a.unusable.as_ref().map_or("usable".to_owned(), |why| format!("unusable, {why}"));
            format!("gpu:{} {} ({}; {state})", a.index, a.name, a.backend)
        })
        .collect();
    let found = match found.is_empty() {
        true => "this machine has no graphics adapter that a driver (Vulkan, Metal, DX12) offers".to_owned(),
        false => format!("there are {}", found.join(", ")),
    };
    Err(Error::Input(format!("there is no usable device {name}: {found}; --device cpu does without")))
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, path::Path};

    use super::*;
    use crate::checkpoint::Checkpoint;

    fn tales() -> Blueprint {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-18m");
        Blueprint::of(&Checkpoint::open(&folder).unwrap()).unwrap()
    }

    fn adapter(index: usize, kind: AdapterKind, memory: Option<u64>) -> Adapter {
        Adapter {
            index,
            name: format!("card {index}"),
            backend: "Vulkan".into(),
            kind,
            driver: "none".into(),
            memory,
            max_buffer: 1 << 30,
            max_binding: 1 << 27,
            subgroup: None,
            f16: false,
            cooperative_matrix: false,
            unusable: None,
        }
    }

    /// What is chosen on a machine with these adapters: the names that were opened, the last of them in use, and why.
    fn choose(
        name: &str,
        request: MemoryRequest,
        adapters: &[Adapter],
        broken: &str,
    ) -> (Vec<String>, Result<ChosenDevice, Error>) {
        let opened = RefCell::new(Vec::new());
        let machine = Machine {
            graphics: true,
            adapters: &|| adapters.to_vec(),
            open: &|name| {
                opened.borrow_mut().push(name.to_owned());
                if name == broken {
                    return Err(Error::Input("it is broken".into()));
                }
                let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
                moeflux_compute::open(&options).map_err(Error::at(|| name))
            },
        };
        let chosen = machine.choose(&tales(), &request, name).map(|o| o.chosen);
        (opened.into_inner(), chosen)
    }

    #[test]
    fn auto_takes_the_largest_card_that_holds_the_model() {
        use AdapterKind::{Discrete, Integrated, Software, Virtual};
        let roomy = MemoryRequest { budget: Some(4 << 30), ..MemoryRequest::default() };
        let all = [
            adapter(0, Software, Some(1 << 40)),
            adapter(1, Integrated, Some(1 << 36)),
            adapter(2, Discrete, Some(1 << 33)),
            adapter(3, Discrete, Some(1 << 35)),
            adapter(4, Virtual, None),
        ];
        let (opened, chosen) = choose("auto", roomy, &all, "");
        let chosen = chosen.unwrap();
        assert_eq!((opened, chosen.adapter.as_deref()), (vec!["gpu:3".to_owned()], Some("card 3")));
        assert_eq!(chosen.reason, "it holds the whole model");
        // One that fails is passed over.
        assert_eq!(choose("auto", roomy, &all, "gpu:3").0, ["gpu:3", "gpu:2"]);
        // Small ones, broken ones and those that are none are not opened.
        let mut none = all.clone();
        none[1].unusable = Some("it is from 1996".into());
        none[2].memory = Some(1 << 20);
        none[3].memory = Some(1 << 20);
        let (opened, chosen) = choose("auto", roomy, &none, "");
        let chosen = chosen.unwrap();
        assert_eq!((opened, chosen.adapter), (vec!["cpu".to_owned()], None));
        for part in ["card 1: it is from 1996", "card 2: its 1 MiB are fewer", "card 3: "] {
            assert!(chosen.reason.contains(part), "{}", chosen.reason);
        }
        let (opened, chosen) = choose("auto", roomy, &all[..1], "");
        assert_eq!(
            (opened, chosen.unwrap().reason),
            (vec!["cpu".into()], "there is no graphics hardware".into())
        );
    }

    #[test]
    fn auto_takes_the_processor_where_a_card_holds_less_than_a_token_needs() {
        let few = MemoryRequest { budget: Some(4 << 30), slots: Some(31), ..MemoryRequest::default() };
        let card = [adapter(0, AdapterKind::Discrete, None)];
        let (opened, chosen) = choose("auto", few, &card, "");
        assert_eq!(opened, ["gpu:0", "cpu"]);
        let reason = chosen.unwrap().reason;
        assert!(reason.contains("room for 31 experts, and one token needs 32"), "{reason}");
        let some = MemoryRequest { slots: Some(32), ..few };
        let reason = choose("auto", some, &card, "").1.unwrap().reason;
        assert_eq!(reason, "it holds the dense weights and 32 of 256 experts");
        let small = MemoryRequest { budget: Some(64 << 20), ..MemoryRequest::default() };
        let (opened, _) = choose("auto", small, &card, "");
        assert_eq!(opened, ["cpu"]);
    }

    #[test]
    fn an_adapter_that_was_asked_for_is_taken_or_missed() {
        let roomy = MemoryRequest { budget: Some(4 << 30), ..MemoryRequest::default() };
        let mut all = [adapter(0, AdapterKind::Software, None), adapter(1, AdapterKind::Discrete, None)];
        assert_eq!(choose("gpu", roomy, &all, "").0, ["gpu:1"]);
        assert_eq!(choose("gpu:0", roomy, &all, "").0, ["gpu:0"]);
        all[1].unusable = Some("its driver is too old".into());
        assert_eq!(choose("gpu", roomy, &all, "").0, ["gpu:0"]);
        for name in ["gpu:1", "gpu:2", "gpu:", "gpu:x"] {
            let (opened, chosen) = choose(name, roomy, &all, "");
            let error = chosen.unwrap_err().to_string();
            assert!(opened.is_empty() && error.contains(name), "{error}");
            assert!(error.contains("gpu:1 card 1 (Vulkan; unusable, its driver is too old)"), "{error}");
        }
        let error = choose("gpu", roomy, &[], "").1.unwrap_err().to_string();
        assert!(error.contains("no graphics adapter"), "{error}");
        // What was asked for is not replaced.
        assert!(choose("gpu:0", roomy, &all, "gpu:0").1.is_err());
    }
}
