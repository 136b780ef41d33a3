//! `serve`: answers requests over HTTP.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    process::ExitCode,
};

use anyhow::{Context, ensure};
use moeflux::{
    Checkpoint,
    base::Notices,
    checkpoint::list_models,
    experts::DiskSpeed,
    runtime::LineName,
    serve::{ServingCore, ServingOptions},
};
use moeflux_bench::units;
use moeflux_hub::PublicFetcher;
use moeflux_server::{
    ApiKeys, IMAGE_FETCH_BYTES, ImageFetcher, KeepAlive, LoadError, LoadedModel, ModelLoader,
    Models, OfferedModel, RequestLog, RequestRecord, Server, ServerError, ServerOptions,
    StartModel, request_memory, reserved_bytes,
};

use crate::{
    args::{EngineArgs, ServeArgs},
    folders, freed_memory,
    hub::{self, ModelDownload},
    interrupt,
    load::{self, Needs},
    model_settings::{ModelSettings, SettingsFile},
    out,
    progress::Ui,
    wrong_use::WrongUse,
};

/// Name of the built-in model.
const BUILT_IN: &str = "tales-18m";

/// Folder of answers within the prefix cache.
const TURNS: &str = "turns";

/// Default of `--sessions`.
pub(crate) const SESSIONS: usize = 4;

/// Runs `moeflux serve`.
///
/// # Errors
/// The address cannot be listened at, or the model cannot be loaded; there are no models, or their
/// settings are wrong.
pub(crate) fn run(args: &ServeArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    // A folder that cannot be written is an error before a model is loaded.
    args.cache.open_for_server()?;
    let notices = Notices::new(move |text| ui.note(text));
    let mut options = options(args, ui)?;
    let budget = args.engine.memory.request().host_budget();
    options.request_memory = request_memory(budget);
    let fetches = if args.image_urls.is_empty() { 0 } else { IMAGE_FETCH_BYTES };
    let shared = SharedServer { reserved: reserved_bytes(budget) + fetches, notices, ui };
    let server = Server::bind(options).map_err(|error| match error {
        open @ (ServerError::OpenWithoutKey { .. } | ServerError::OriginWithoutKey { .. }) => {
            WrongUse(open.to_string()).into()
        }
        other => anyhow::Error::new(other),
    })?;
    // A model that is downloaded gets its folder only now.
    let name = name(args);
    let models = match &args.models {
        Some(folder) => several(args, folder, shared)?,
        None => {
            let EngineArgs { model, reads, .. } = &args.engine;
            let (checkpoint, download) = load::streamed(model, &reads.mirror, ui)?;
            let settings = ModelSettings::default();
            let starting = Starting { args, settings: &settings, shared: &shared };
            let loaded = starting.start(checkpoint, download.as_ref())?;
            if let Some(download) = download {
                download.finish_in_background(ui)?;
            }
            Models::one(name, loaded)?
        }
    };
    // The server ends at the first Ctrl-C, the program at the second.
    let armed = interrupt::arm();
    let address = server.address();
    let page = page(address);
    match models.offered() {
        [model] => {
            out::line(format_args!("{} is served at http://{address}/v1\n{page}", model.name))?
        }
        several => {
            let names: Vec<&str> = several.iter().map(|model| &*model.name).collect();
            let (count, names) = (names.len(), names.join(", "));
            out::line(format_args!(
                "{count} models are served at http://{address}/v1: {names}\n{page}"
            ))?;
        }
    }
    server.run(models)?;
    // The signal that ended the server may reach the program's own handler only now.
    std::mem::forget(armed);
    Ok(ExitCode::SUCCESS)
}

/// Line with the URL of the web page. A server that listens at all addresses is reached at the
/// machine's own.
fn page(mut address: SocketAddr) -> String {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    format!("chat in a browser: http://{address}/")
}

/// Models of a folder, with their settings.
fn several(args: &ServeArgs, folder: &Path, shared: SharedServer) -> anyhow::Result<Models> {
    let listed = list_models(folder)?;
    let names: Vec<&str> = listed.iter().map(|model| &*model.name).collect();
    let settings = SettingsFile::read(folder, &names)?;
    let offered = listed.iter().map(|model| {
        let of_model = settings.of_model(&model.name);
        let ttl = of_model.args(args, &model.path).ttl;
        let offered = OfferedModel::new(&model.name, &model.path);
        offered.aliases(of_model.aliases).ttl(ttl.and_then(KeepAlive::time))
    });
    let offered = offered.collect();
    let loader = FolderLoader { args: args.clone(), settings, shared };
    let models = Models::several(offered, loader);
    Ok(models.with_context(|| folder.display().to_string())?.waiting(args.waiting))
}

/// Loads the models of a folder.
struct FolderLoader {
    args: ServeArgs,
    settings: SettingsFile,
    shared: SharedServer,
}

impl ModelLoader for FolderLoader {
    fn open(&mut self, model: &OfferedModel) -> Result<StartModel, LoadError> {
        let ui = self.shared.ui;
        let failed = move |error: anyhow::Error| {
            let error = format!("{error:#}");
            ui.line(format_args!("error: {error}"));
            LoadError::from(error)
        };
        ui.line(format_args!("{} is being loaded", model.name));
        let settings = self.settings.of_model(&model.name);
        let args = settings.args(&self.args, &model.path);
        let checkpoint = load::checkpoint(&args.engine.model, &[], ui).map_err(failed)?;
        let shared = self.shared.clone();
        Ok(Box::new(move || {
            let starting = Starting { args: &args, settings: &settings, shared: &shared };
            starting.start(checkpoint, None).map_err(failed)
        }))
    }
}

/// State of a server that all its models share.
#[derive(Clone)]
struct SharedServer {
    /// Bytes that the server holds beside its engine.
    reserved: u64,
    notices: Notices,
    ui: Ui,
}

/// Arguments of the start of a model.
struct Starting<'a> {
    args: &'a ServeArgs,
    settings: &'a ModelSettings,
    shared: &'a SharedServer,
}

impl Starting<'_> {
    /// Loads the model and starts its serving core.
    fn start(
        &self,
        checkpoint: Checkpoint,
        download: Option<&ModelDownload>,
    ) -> anyhow::Result<LoadedModel> {
        let Self { args, settings, shared } = *self;
        let SharedServer { reserved, notices, ui } = shared;
        let mut needs = Needs {
            marks: true,
            sessions: Some(args.sessions.map_or(SESSIONS, Into::into)),
            reserved: Some(*reserved),
            grammars: true,
            images: Some(args.images),
            ..Needs::default()
        };
        needs.hold(download);
        let engine = load::engine_from(checkpoint, &args.engine, needs, *ui)?;
        // As `plan` or `bench` measured it, if they did.
        let measured = folders::probes()
            .and_then(|folder| DiskSpeed::remembered(&folder, engine.blueprint().slot_bytes()));
        let plan = engine.plan();
        ui.line(format_args!(
            "memory plan: {}, of which {} are for the server; prefix cache: {}",
            units::memory(plan.host().total()),
            units::memory(plan.bytes(LineName::Reserved)),
            units::memory(plan.prefix_bytes())
        ));
        let cache = args.cache.open_for_server()?.map(|folder| folder.notices(notices.clone()));
        let serving = ServingOptions::default().waiting(args.waiting).prefix_cache(cache);
        let core = ServingCore::start(&engine, serving)?;
        // Wrong settings of generation are errors of requests.
        let generation = engine.text().and_then(|text| text.generation()).ok();
        let sampling = generation.and_then(|generation| settings.sampling(&generation.sampling));
        let turns = args.cache.prefix_cache.as_ref().map(|folder| folder.join(TURNS));
        let model = LoadedModel::new(core).sampling(sampling).turn_folder(turns);
        let model = model.turn_bytes(args.cache.answers_size()).notices(notices.clone());
        Ok(model.disk_speed(measured.map(|speed| speed.ceiling())))
    }
}

fn options(args: &ServeArgs, ui: Ui) -> anyhow::Result<ServerOptions> {
    let mut options = ServerOptions::default();
    (options.host, options.port, options.no_key) = (args.host, args.port, args.no_key);
    options.give_back = freed_memory::give_back;
    options.overflow = args.overflow.into();
    options.lenient_schemas = args.lenient_schemas;
    options.open_objects = args.open_objects;
    options.allow_hosts.clone_from(&args.allow_host);
    options.allow_origins.clone_from(&args.allow_origin);
    if !args.image_urls.is_empty() {
        let fetcher = PublicFetcher::new(args.image_urls.clone())?;
        options.images = ImageFetcher::new(move |url, bytes| {
            fetcher.fetch(url, bytes).map_err(|error| error.to_string())
        });
    }
    options.log = RequestLog::new(move |record| {
        let RequestRecord { id, method, path, status, time, notes, .. } = record;
        let notes = notes.as_ref().map(|notes| format!(" ({notes})")).unwrap_or_default();
        ui.line(format_args!(
            "{method} {path} {status} {} s {id}{notes}",
            units::figure(time.as_secs_f64())
        ));
    });
    if let Some(path) = &args.api_key_file {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("{}: cannot be read", path.display()))?;
        options.keys = ApiKeys::from_lines(&text);
        ensure!(!options.keys.is_empty(), "{}: it has no keys: write one per line", path.display());
    }
    Ok(options)
}

/// Name of the model in answers: that of the Hub or of its folder.
fn name(args: &ServeArgs) -> String {
    let folder = args.engine.model.model.as_deref();
    if let Some(name) = folder.and_then(|folder| hub::name(folder).ok()?) {
        return name.to_string();
    }
    let name = folder.and_then(|folder| Some(folder.canonicalize().ok()?.file_name()?.to_owned()));
    name.map_or_else(|| BUILT_IN.to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_an_address_that_a_browser_reaches() {
        for (address, url) in [
            ("127.0.0.1:8080", "http://127.0.0.1:8080/"),
            ("0.0.0.0:80", "http://127.0.0.1:80/"),
            ("[::]:9000", "http://[::1]:9000/"),
            ("192.168.0.2:8080", "http://192.168.0.2:8080/"),
        ] {
            let line = page(address.parse().unwrap());
            assert!(line.ends_with(&format!(": {url}")), "{line}");
        }
    }
}
