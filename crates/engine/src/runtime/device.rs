//! Device selection: opens the requested device, or the fastest one that fits a model.

use std::{
    panic::resume_unwind,
    sync::{Arc, mpsc},
    thread,
};

use moeflux_base::{
    Error, PlanError, SystemMemory,
    seam::{has_graphics, physical_cores},
};
use moeflux_compute::{Adapter, AdapterKind, Device, DeviceOptions, Isa};
use moeflux_model::{blueprint::Blueprint, checkpoint::Checkpoint};

use super::open_device::OpenDevice;
use crate::{
    experts::{PlacementOptions, placement::ExpertsOnHost},
    runtime::{
        card_list::{card_names, open_cards},
        card_speeds::measure_kinds,
        model_text::ModelText,
        plan::{ImageMemory, MemoryPlan, MemoryRequest, counted_process, host_budget},
    },
};

/// Host memory that has to be left before `auto` loads a graphics driver.
const DRIVER: u64 = 256 << 20;

/// Wraps a device after it was opened; for tests that limit or observe it.
pub type WrapDevice = Arc<dyn Fn(Box<dyn Device>) -> Box<dyn Device> + Send + Sync>;

/// Function that tells the memory of images whose vision tower is on the device of this name.
pub(crate) type PlanImages<'a> = dyn Fn(&str) -> Result<ImageMemory, Error> + 'a;

/// Devices that are asked for.
pub(crate) struct DeviceRequest<'a> {
    pub(crate) options: &'a DeviceOptions,
    pub(crate) wrap: Option<&'a WrapDevice>,
    /// Memory of images, if they are read.
    pub(crate) images: Option<&'a PlanImages<'a>>,
}

impl<'a> DeviceRequest<'a> {
    /// Devices of a model without images.
    pub(crate) fn of_text(options: &'a DeviceOptions, wrap: Option<&'a WrapDevice>) -> Self {
        Self { options, wrap, images: None }
    }
}

/// The selected device, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChosenDevice {
    /// Description of the device: "cpu, AVX-512 VNNI, 2 threads".
    pub name: String,
    /// Whether it is a graphics adapter.
    pub graphics: bool,
    /// Reason of the choice.
    pub reason: String,
    /// Name of the device of the vision tower, if images are planned.
    pub images: Option<String>,
}

/// An open device with its memory plan.
pub(crate) struct OpenedDevice {
    pub(crate) device: Box<dyn Device>,
    pub(crate) plan: MemoryPlan,
    pub(crate) chosen: ChosenDevice,
}

/// Devices of this machine.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Devices {
    /// Best instruction set of the CPU.
    pub isa: &'static str,
    /// Default number of compute threads.
    pub threads: usize,
    /// Memory of the host.
    pub memory: SystemMemory,
    /// Graphics adapters, by index.
    pub adapters: Vec<Adapter>,
    /// Index of the adapter that `auto` prefers for a model that fits it; `None` for the CPU.
    pub preferred: Option<usize>,
}

impl Devices {
    /// Detects the devices. Loads the graphics drivers.
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

/// Loads a model's text, opens the requested device and plans its memory, also of images. The plan
/// counts text and device as the process.
///
/// `auto` is the first hardware adapter whose memory holds dense weights, states, scratch and the
/// experts of one token; else the CPU. It is never a software adapter, which is the CPU, but
/// slower. There the vision tower is on the adapter, unless that costs more than an eighth of the
/// experts there. Of an asked device the first card has it.
///
/// # Errors
/// The tokenizer is broken, there is no such device, or the budget is below the floor.
pub(crate) fn open_device(
    checkpoint: &Checkpoint,
    blueprint: &Blueprint,
    request: &MemoryRequest,
    asked: &DeviceRequest<'_>,
) -> Result<(ModelText, OpenedDevice), Error> {
    let &DeviceRequest { options, wrap, images } = asked;
    let name = options.name.as_deref().unwrap_or("cpu");
    if options.exact && request.experts_on_host == ExpertsOnHost::Compute {
        return Err(PlanError::HostExpertsExact.into());
    }
    let request = request.on_path(options.exact);
    let request = &request.host_threads(request.host_threads.or(options.threads));
    let load = || ModelText::for_checkpoint(checkpoint, blueprint);
    let open = |text_loaded: &dyn Fn()| {
        let selector = DeviceSelector {
            graphics: has_graphics(),
            adapters: &moeflux_compute::adapters,
            open: &|name, id| {
                let threads = options.threads.or_else(|| Some(physical_cores()));
                let options = options.clone().name(name).threads(threads).id(id.or(options.id));
                let device =
                    moeflux_compute::open(&options).map_err(Error::at(|| "opening the device"))?;
                Ok(match wrap {
                    Some(wrap) => wrap(device),
                    None => device,
                })
            },
            images,
            text_loaded,
        };
        selector.choose(blueprint, request, name)
    };
    if !loads_driver(name, request) {
        let text = load()?;
        return Ok((text, open(&|| ())?));
    }
    // A driver and a large tokenizer take some tenths of a second each.
    thread::scope(|scope| {
        let (loading, loaded) = mpsc::channel::<()>();
        let load_text = move || {
            let _loading = loading;
            load()
        };
        let spawned =
            thread::Builder::new().name("tokenizer".into()).spawn_scoped(scope, load_text);
        let Ok(spawned) = spawned else { return Ok((load()?, open(&|| ())?)) };
        let opened = open(&|| {
            // Returns an error once the thread has ended.
            let _ = loaded.recv();
        });
        let text = spawned.join().unwrap_or_else(|cause| resume_unwind(cause))?;
        Ok((text, opened?))
    })
}

/// Whether a graphics driver will be loaded, and the budget has ample room for it.
fn loads_driver(name: &str, request: &MemoryRequest) -> bool {
    let system = SystemMemory::now();
    let has_room =
        || host_budget(request, &system) >= counted_process(request, &system) + 4 * DRIVER;
    name.starts_with("gpu") || name == "auto" && has_graphics() && has_room()
}

/// The machine that devices are selected on; tests provide their own.
struct DeviceSelector<'a> {
    /// Whether it may have graphics hardware.
    graphics: bool,
    adapters: &'a dyn Fn() -> Vec<Adapter>,
    open: &'a OpenDevice<'a>,
    images: Option<&'a PlanImages<'a>>,
    /// Waits until the text is loaded, which the plan counts.
    text_loaded: &'a dyn Fn(),
}

impl DeviceSelector<'_> {
    fn choose(
        &self,
        blueprint: &Blueprint,
        request: &MemoryRequest,
        name: &str,
    ) -> Result<OpenedDevice, Error> {
        match name {
            "auto" => match self.open_first_fitting(blueprint, request) {
                Ok(opened) => Ok(opened),
                Err(reasons) => self.open_as("cpu", blueprint, request, &reasons, &["cpu"]),
            },
            _ => {
                let first = name.split(',').next().unwrap_or(name).trim();
                self.open_as(name, blueprint, request, "asked for", &[first])
            }
        }
    }

    fn open_as(
        &self,
        name: &str,
        blueprint: &Blueprint,
        request: &MemoryRequest,
        reason: &str,
        towers: &[&str],
    ) -> Result<OpenedDevice, Error> {
        let mut request = *request;
        let device = match card_names(name) {
            Some(names) => {
                let device = open_cards(&names, self.adapters, self.open)?;
                if request.card_speeds.is_none() {
                    request.card_speeds = measure_kinds(&names, &(self.adapters)(), self.open)?;
                }
                device
            }
            None => (self.open)(name, None)?,
        };
        (self.text_loaded)();
        let (plan, images) = self.plan(blueprint, &request, &*device, towers)?;
        let (name, graphics) = (device.describe(), device.memory().is_some());
        let chosen = ChosenDevice { name, graphics, reason: reason.into(), images };
        Ok(OpenedDevice { device, plan, chosen })
    }

    /// Plan with the vision tower, if images are planned, on the first of `towers`; on the second
    /// one if the first has no room, or leaves less than 7/8 of the slots.
    fn plan(
        &self,
        blueprint: &Blueprint,
        request: &MemoryRequest,
        device: &dyn Device,
        towers: &[&str],
    ) -> Result<(MemoryPlan, Option<String>), Error> {
        let (Some(images), Some((first, other))) = (self.images, towers.split_first()) else {
            return Ok((MemoryPlan::new(blueprint, request, device)?, None));
        };
        let with_tower = |name: &str| -> Result<_, Error> {
            let request = request.images(images(name)?);
            Ok((MemoryPlan::new(blueprint, &request, device)?, Some(name.to_owned())))
        };
        let planned = with_tower(first);
        let Some(other) = other.first() else { return planned };
        match (planned, with_tower(other)) {
            (Ok(planned), Ok(other)) if 8 * planned.0.slots() < 7 * other.0.slots() => Ok(other),
            (Ok(planned), _) => Ok(planned),
            (Err(_), other) => other,
        }
    }

    /// Opens the first adapter that `auto` may use. The error lists why none fits.
    fn open_first_fitting(
        &self,
        blueprint: &Blueprint,
        request: &MemoryRequest,
    ) -> Result<OpenedDevice, String> {
        if !self.graphics {
            return Err("there is no graphics hardware".into());
        }
        // A loaded driver occupies memory for good, so with a small budget adapters are not even
        // enumerated.
        let system = SystemMemory::now();
        if host_budget(request, &system) < counted_process(request, &system) + DRIVER {
            return Err("the memory budget has no room for a graphics driver".into());
        }
        let adapters = (self.adapters)();
        let mut reasons = Vec::new();
        for adapter in by_preference(&adapters).filter(|a| is_hardware(a)) {
            match self.try_adapter(adapter, blueprint, request) {
                Ok(opened) => return Ok(opened),
                Err(why) => reasons.push(format!("{}: {why}", adapter.name)),
            }
        }
        Err(match reasons.is_empty() {
            true => "no driver offers graphics hardware".into(),
            false => reasons.join("; "),
        })
    }

    fn try_adapter(
        &self,
        adapter: &Adapter,
        blueprint: &Blueprint,
        request: &MemoryRequest,
    ) -> Result<OpenedDevice, String> {
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
        let opened = self.open_as(&name, blueprint, request, "", &[&name, "cpu"]);
        let mut opened = opened.map_err(|error| error.to_string())?;
        let (slots, all) = (opened.plan.slots(), blueprint.experts());
        if !opened.plan.holds_all && slots < working_set {
            return Err(format!(
                "it has room for {slots} experts, and one token needs {working_set}"
            ));
        }
        opened.chosen.reason = match slots {
            _ if slots >= all => "it holds the whole model".into(),
            _ if opened.plan.holds_all => {
                format!(
                    "it holds the dense weights and {slots} of {all} experts, the host's memory the rest"
                )
            }
            _ => format!("it holds the dense weights and {slots} of {all} experts"),
        };
        Ok(opened)
    }
}

/// Whether the adapter is graphics hardware, not a software or virtual adapter.
fn is_hardware(adapter: &Adapter) -> bool {
    matches!(adapter.kind, AdapterKind::Discrete | AdapterKind::Integrated)
}

/// Adapters by kind, discrete GPUs first, then by memory size.
fn by_preference(adapters: &[Adapter]) -> impl Iterator<Item = &Adapter> {
    let mut sorted: Vec<&Adapter> = adapters.iter().collect();
    sorted.sort_by_key(|a| a.preference());
    sorted.into_iter()
}

impl MemoryPlan {
    /// The plan that an engine would make for this checkpoint now. Opens tokenizer and device, as
    /// they occupy memory, but loads no weights. Measures card and processor where experts in host
    /// memory are divided by their speeds, unless `placement` has a recorded division.
    ///
    /// # Errors
    /// There is no such device, the tokenizer is broken, or the budget is below the floor; the
    /// error states the floor and how to lower it.
    pub fn for_checkpoint(
        checkpoint: &Checkpoint,
        blueprint: &Blueprint,
        request: &MemoryRequest,
        device: &DeviceOptions,
        placement: &PlacementOptions,
    ) -> Result<(Self, ChosenDevice), Error> {
        let request = &request.on_path(device.exact);
        let asked = DeviceRequest::of_text(device, None);
        let (_text, opened) = open_device(checkpoint, blueprint, request, &asked)?;
        let OpenedDevice { device: mut opened, mut plan, chosen } = opened;
        let placement = &placement.followed(request.experts_on_host);
        if plan.placement().is_some() || placement.recorded.is_some() {
            let model = checkpoint.identity().ok();
            plan.place_unloaded(blueprint, model, placement, |plan| match request.expert_times {
                Some(times) => Ok(Some(times)),
                None => plan.measure_experts(&mut *opened, blueprint, device.threads),
            })?;
        }
        Ok((plan, chosen))
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, path::Path};

    use super::*;
    use crate::runtime::pools::LineName;

    fn tales() -> Blueprint {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tales/model");
        Blueprint::for_checkpoint(&Checkpoint::open(&folder).unwrap()).unwrap()
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

    /// Selects a device on a machine with these adapters. Returns the names that were opened, the
    /// last of them in use, and the choice.
    fn choose(
        name: &str,
        request: MemoryRequest,
        adapters: &[Adapter],
        broken: &str,
    ) -> (Vec<String>, Result<ChosenDevice, Error>) {
        let (opened, chosen) = choose_with_images(name, request, adapters, broken, None);
        (opened, chosen.map(|opened| opened.chosen))
    }

    /// The same with images.
    fn choose_with_images(
        name: &str,
        request: MemoryRequest,
        adapters: &[Adapter],
        broken: &str,
        images: Option<&PlanImages<'_>>,
    ) -> (Vec<String>, Result<OpenedDevice, Error>) {
        let opened = RefCell::new(Vec::new());
        let selector = DeviceSelector {
            graphics: true,
            adapters: &|| adapters.to_vec(),
            open: &|name, id| {
                opened.borrow_mut().push(name.to_owned());
                if name == broken {
                    return Err(Error::internal("it is broken"));
                }
                let options = DeviceOptions::default().threads(1).id(id);
                moeflux_compute::open(&options).map_err(Error::at(|| name))
            },
            images,
            text_loaded: &|| (),
        };
        let chosen = selector.choose(&tales(), &request, name);
        (opened.into_inner(), chosen)
    }

    #[test]
    fn the_vision_tower_is_on_the_card_unless_it_costs_many_experts() {
        let card = [adapter(0, AdapterKind::Discrete, None)];
        let (budget, context, marks) = (4 << 30, Some(64), Some(0));
        let request =
            MemoryRequest { budget: Some(budget), context, marks, ..MemoryRequest::default() };
        let plan = choose_with_images("auto", request, &card, "", None).1.unwrap().plan;
        let (all, slots) = (plan.fastest().total(), plan.bytes(LineName::Slots));
        let free = budget - all;
        let tower = |name: &str, on_card: u64| {
            let images = |name: &str| -> Result<_, Error> {
                let on_card = if name == "cpu" { 0 } else { on_card };
                Ok(ImageMemory { card: on_card, ..ImageMemory::default() })
            };
            let (opened, chosen) = choose_with_images(name, request, &card, "", Some(&images));
            let on_card = opened.last().is_some_and(|name| name.starts_with("gpu"));
            (on_card, chosen.map(|opened| opened.chosen.images))
        };
        let auto = |on_card| {
            let (on_card, images) = tower("auto", on_card);
            assert!(on_card);
            images.unwrap()
        };
        // The process may grow meanwhile.
        assert_eq!(auto(free - slots / 2).as_deref(), Some("gpu:0"));
        assert_eq!(auto(free + slots / 4 * 3).as_deref(), Some("cpu"));
        assert_eq!(auto(budget).as_deref(), Some("cpu"));
        assert_eq!(tower("cpu", 0).1.unwrap().as_deref(), Some("cpu"));
        // A card that was asked for has the tower.
        assert_eq!(tower("gpu", free + slots / 2).1.unwrap().as_deref(), Some("gpu"));
        assert!(tower("gpu", budget).1.is_err());
        assert_eq!(choose("auto", request, &card, "").1.unwrap().images, None);
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
        assert_eq!(
            (opened, chosen.unwrap().reason),
            (vec!["gpu:3".into()], "it holds the whole model".into())
        );
        // An adapter that fails is skipped.
        assert_eq!(choose("auto", roomy, &all, "gpu:3").0, ["gpu:3", "gpu:2"]);
        // Adapters that are too small, unusable or no hardware are not opened.
        let mut none = all.clone();
        none[1].unusable = Some("it is from 1996".into());
        none[2].memory = Some(1 << 20);
        none[3].memory = Some(1 << 20);
        let (opened, chosen) = choose("auto", roomy, &none, "");
        let chosen = chosen.unwrap();
        assert_eq!(opened, ["cpu"]);
        for part in ["card 1: it is from 1996", "card 2: its 1 MiB are fewer", "card 3: "] {
            assert!(chosen.reason.contains(part), "{}", chosen.reason);
        }
        let (opened, chosen) = choose("auto", roomy, &all[..1], "");
        assert_eq!(
            (opened, chosen.unwrap().reason),
            (vec!["cpu".into()], "no driver offers graphics hardware".into())
        );
        assert_eq!(
            choose("auto", roomy, &[], "").1.unwrap().reason,
            "no driver offers graphics hardware"
        );
    }

    #[test]
    fn auto_takes_the_cpu_if_no_card_holds_the_working_set_of_a_token() {
        let few =
            MemoryRequest { budget: Some(4 << 30), slots: Some(31), ..MemoryRequest::default() };
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
    fn a_requested_device_is_not_replaced() {
        let card = [adapter(0, AdapterKind::Discrete, None)];
        for name in ["gpu", "gpu:0", "gpu:7", "cpu", "reference"] {
            let (opened, chosen) = choose(name, MemoryRequest::default(), &card, "");
            assert_eq!(
                (opened, chosen.unwrap().reason),
                (vec![name.to_owned()], "asked for".to_owned())
            );
            let (opened, chosen) = choose(name, MemoryRequest::default(), &card, name);
            assert!(opened == [name] && chosen.is_err());
        }
    }

    #[test]
    fn a_list_names_different_adapters() {
        use AdapterKind::{Discrete, Software};
        let adapters = [adapter(0, Discrete, None), adapter(1, Software, None)];
        for (name, part) in [
            ("gpu:0,gpu:0", "gpu:0 is named twice"),
            ("gpu:0, gpu:00", "gpu:00 is named twice"),
            ("gpu:1,gpu:0,gpu:0", "gpu:0 is named twice"),
            ("gpu,gpu:0", "\"gpu\" in a list"),
            ("gpu:0,auto", "\"auto\" in a list"),
            ("gpu:0,", "\"\" in a list"),
            ("gpu:x,gpu:0", "\"gpu:x\" in a list"),
        ] {
            let (opened, chosen) = choose(name, MemoryRequest::default(), &adapters, "");
            let error = chosen.unwrap_err().to_string();
            assert!(error.contains(part) && opened.is_empty(), "{name}: {error}");
        }
        // These are opened, but are processors here.
        for (name, first) in
            [("gpu:1,gpu:1", "gpu:1"), ("cpu,gpu:0", "cpu"), ("reference,gpu:0", "reference")]
        {
            let (opened, chosen) = choose(name, MemoryRequest::default(), &adapters, "");
            let error = chosen.unwrap_err().to_string();
            assert!(error.contains("in a list") && opened == [first], "{name}: {error}");
        }
        let many = ["gpu:1"; 17].join(",");
        let error = choose(&many, MemoryRequest::default(), &adapters, "").1.unwrap_err();
        assert!(error.to_string().contains("17 cards"), "{error}");
    }
}
