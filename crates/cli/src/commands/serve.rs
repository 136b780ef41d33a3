//! `serve`: answers requests over HTTP.

use std::process::ExitCode;

use anyhow::{Context, ensure};
use moeflux::{
    experts::DiskSpeed,
    runtime::LineName,
    serve::{ServingCore, ServingOptions},
};
use moeflux_bench::units;
use moeflux_server::{
    ApiKeys, RESERVED_BYTES, RequestLog, RequestRecord, Server, ServerError, ServerOptions,
};

use crate::{
    WrongUse,
    args::ServeArgs,
    folders, interrupt,
    load::{self, Needs},
    out,
    progress::Ui,
};

/// Name of the built-in model.
const BUILT_IN: &str = "tales-18m";

/// Folder of answers within the prefix cache.
const TURNS: &str = "turns";

/// Runs `moeflux serve`.
///
/// # Errors
/// The address cannot be listened at, or the model cannot be loaded.
pub(crate) fn run(args: &ServeArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let cache = args.cache.open()?;
    let server = Server::bind(options(args, ui)?).map_err(|error| match error {
        open @ ServerError::OpenWithoutKey { .. } => WrongUse(open.to_string()).into(),
        other => anyhow::Error::new(other),
    })?;
    let needs = Needs {
        marks: true,
        sessions: Some(args.sessions.into()),
        reserved: Some(RESERVED_BYTES),
        grammars: true,
        ..Needs::default()
    };
    let engine = load::engine(&args.engine, needs, ui)?;
    // As `plan` or `bench` measured it, if they did.
    let measured = folders::probes()
        .and_then(|folder| DiskSpeed::remembered(&folder, engine.blueprint().slot_bytes()));
    let server = server.disk_speed(measured.map(|speed| speed.ceiling()));
    let plan = engine.plan();
    ui.line(format_args!(
        "memory plan: {}, of which {} are for the server",
        units::memory(plan.host().total()),
        units::memory(plan.bytes(LineName::Reserved))
    ));
    let serving = ServingOptions::default().waiting(args.waiting).prefix_cache(cache);
    let core = ServingCore::start(&engine, serving)?;
    let model = name(args);
    // The server ends at the first Ctrl-C, the program at the second.
    let armed = interrupt::arm();
    out::line(format_args!("{model} is served at http://{}/v1", server.address()))?;
    server.run(core, model)?;
    // The signal that ended the server may reach the program's own handler only now.
    std::mem::forget(armed);
    Ok(ExitCode::SUCCESS)
}

fn options(args: &ServeArgs, ui: Ui) -> anyhow::Result<ServerOptions> {
    let mut options = ServerOptions::default();
    (options.host, options.port, options.no_key) = (args.host, args.port, args.no_key);
    options.overflow = args.overflow.into();
    options.allow_hosts.clone_from(&args.allow_host);
    options.turn_folder = args.cache.prefix_cache.as_ref().map(|folder| folder.join(TURNS));
    options.log = RequestLog::new(move |record| {
        let RequestRecord { id, method, path, status, time, .. } = record;
        ui.line(format_args!("{method} {path} {status} {:.3} s {id}", time.as_secs_f64()));
    });
    if let Some(path) = &args.api_key_file {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("{}: cannot be read", path.display()))?;
        options.keys = ApiKeys::from_lines(&text);
        ensure!(!options.keys.is_empty(), "{}: it has no keys: write one per line", path.display());
    }
    Ok(options)
}

/// Name of the model in answers: that of its folder.
fn name(args: &ServeArgs) -> String {
    let folder = args.engine.model.model.as_deref();
    let name = folder.and_then(|folder| Some(folder.canonicalize().ok()?.file_name()?.to_owned()));
    name.map_or_else(|| BUILT_IN.to_owned(), |name| name.to_string_lossy().into_owned())
}
