//! Report of the ways to compute experts in host memory beside a graphics card.

use std::fmt;

use moeflux::{
    MemoryPlan,
    runtime::ChosenDevice,
    tools::{HostForecast, HostWay},
};
use serde::Serialize;

use crate::{budget_report::ServingRow, table::Table, units};

/// Predictions beside a card.
#[derive(Debug, Serialize)]
pub struct HostReport {
    model: String,
    device: String,
    /// Position of the predicted token.
    context: usize,
    #[serde(flatten)]
    forecast: HostForecast,
    /// Plan of a server, if there is one.
    serving: Option<ServingRow>,
}

impl HostReport {
    /// The report of a model on a device.
    pub fn new(
        model: String,
        device: &ChosenDevice,
        context: usize,
        forecast: HostForecast,
    ) -> Self {
        Self { model, device: device.name.clone(), context, forecast, serving: None }
    }

    /// The report with the slots and the prefix cache of a server's plan.
    #[must_use]
    pub fn with_serving(self, plan: Option<&MemoryPlan>) -> Self {
        Self { serving: plan.map(ServingRow::new), ..self }
    }
}

impl fmt::Display for HostReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, device, context, forecast, serving } = self;
        let HostForecast { times, experts, on_card, on_disk, ways, worth_having, .. } = forecast;
        writeln!(f, "{model} on {device}; decode after {context} tokens")?;
        writeln!(
            f,
            "{} of {} experts in the GPU's memory, {} in the host's",
            on_card,
            experts,
            experts - on_card - on_disk
        )?;
        if *on_disk > 0 {
            writeln!(f, "{on_disk} stay on the disk; their reads are not predicted")?;
        }
        writeln!(
            f,
            "the GPU reads experts over the bus at {}, the processor computes them at {} (measured)\n",
            units::speed(times.bus_bytes_per_second()),
            units::speed(times.host_bytes_per_second())
        )?;
        let mut table = Table::new(1);
        table.head(["--experts-on-host", "decode, predicted", "computed on the host", "plan"]);
        for HostWay { experts_on_host, computed, number, tokens_per_second, .. } in ways {
            let speed = units::rate(*tokens_per_second);
            let number = number.clone().unwrap_or_else(|| "none".into());
            table.row([(*experts_on_host).to_owned(), speed, computed.to_string(), number]);
        }
        writeln!(f, "{table}")?;
        writeln!(f, "worth having: {worth_having}")?;
        let Some(ServingRow { slots, prefix_memory, division }) = serving else { return Ok(()) };
        let states = units::memory(*prefix_memory);
        write!(
            f,
            "serve: {slots} slots in the GPU's memory, {states} of states of earlier prompts"
        )?;
        match division {
            Some(division) => writeln!(
                f,
                "; a GiB of slots saves {} a turn, a GiB of more states {}",
                units::time(division.slot_seconds_per_gib),
                units::time(division.prefix_seconds_per_gib)
            ),
            None => writeln!(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use moeflux::experts::{ExpertTime, ExpertTimes};

    use super::*;

    #[test]
    fn a_report_names_the_way_worth_having() {
        let each = |each| ExpertTime { fixed: 0.0, each };
        let times = ExpertTimes {
            bytes: 3 << 20,
            bus: each(130e-6),
            host: each(52e-6),
            ..ExpertTimes::default()
        };
        let way = |experts_on_host, computed, tokens_per_second| HostWay {
            experts_on_host,
            computed,
            number: (computed > 0).then(|| format!("{computed:016x}")),
            tokens_per_second,
        };
        let forecast = HostForecast {
            times,
            experts: 6144,
            on_card: 2048,
            on_disk: 96,
            ways: vec![way("read", 0, 39.4), way("compute", 4000, 61.0), way("auto", 2750, 84.9)],
            worth_having: "auto",
            plan: None,
        };
        let report = HostReport {
            model: "/models/m".into(),
            device: "a GPU".into(),
            context: 1024,
            forecast,
            serving: None,
        };
        let expected = "\
/models/m on a GPU; decode after 1024 tokens
2048 of 6144 experts in the GPU's memory, 4000 in the host's
96 stay on the disk; their reads are not predicted
the GPU reads experts over the bus at 24.2 GB/s, the processor computes them at 60.5 GB/s (measured)

--experts-on-host  decode, predicted  computed on the host              plan
read                      39.4 tok/s                     0              none
compute                   61.0 tok/s                  4000  0000000000000fa0
auto                      84.9 tok/s                  2750  0000000000000abe

worth having: auto
";
        assert_eq!(report.to_string(), expected);
    }
}
