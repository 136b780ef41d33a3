//! Models that a server offers, and how they are loaded.

use std::{error::Error as StdError, fmt, path::PathBuf, time::Duration};

use moeflux::{Error, Sampling, base::Notices, serve::ServingCore};

use crate::requests::turn_folder::FOLDER_BYTES;

/// Default requests that wait for a model.
const WAITING: usize = 64;

/// A model that a server can load.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OfferedModel {
    /// Its name in requests and answers.
    pub name: String,
    /// Other names in requests.
    pub aliases: Vec<String>,
    /// Its folder or file.
    pub path: PathBuf,
    /// Time without requests after which it is unloaded. Default: it stays loaded.
    pub ttl: Option<Duration>,
}

impl OfferedModel {
    /// A model with a name.
    pub fn new(name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        Self { name: name.into(), path: path.into(), ..Self::default() }
    }

    /// The model with other names.
    pub fn aliases(self, aliases: Vec<String>) -> Self {
        Self { aliases, ..self }
    }

    /// The model with a time without requests after which it is unloaded.
    pub fn ttl(self, ttl: Option<Duration>) -> Self {
        Self { ttl, ..self }
    }
}

/// A model that is loaded.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadedModel {
    /// The thread that owns its engine.
    pub core: ServingCore,
    /// Sampling of requests that do not say theirs. Default: that of the checkpoint.
    pub sampling: Option<Sampling>,
    /// Folder of answers with their thoughts and tokens, so that a restarted server continues
    /// conversations with its prefix cache. Default: none.
    pub turn_folder: Option<PathBuf>,
    /// Most bytes on the disk of this folder; default 256 MiB.
    pub turn_bytes: u64,
    /// Receiver of troubles with this folder. Default: none.
    pub notices: Notices,
    /// Speed of the disk in bytes per second, as a probe measured it, for the page and metrics.
    pub disk_speed: Option<f64>,
    /// Whether the program uses the core beside the server, and after its end. Default: no; the
    /// core ends with the server.
    pub is_shared: bool,
}

impl LoadedModel {
    /// A model with the defaults.
    pub fn new(core: ServingCore) -> Self {
        Self {
            core,
            sampling: None,
            turn_folder: None,
            turn_bytes: FOLDER_BYTES,
            notices: Notices::default(),
            disk_speed: None,
            is_shared: false,
        }
    }

    /// The model with a core that the program shares with the server.
    pub fn shared(self, is_shared: bool) -> Self {
        Self { is_shared, ..self }
    }

    /// The model with a sampling of requests that do not say theirs.
    pub fn sampling(self, sampling: Option<Sampling>) -> Self {
        Self { sampling, ..self }
    }

    /// The model with a folder of answers.
    pub fn turn_folder(self, turn_folder: Option<PathBuf>) -> Self {
        Self { turn_folder, ..self }
    }

    /// The model with the most bytes of its folder of answers.
    pub fn turn_bytes(self, turn_bytes: u64) -> Self {
        Self { turn_bytes, ..self }
    }

    /// The model with a receiver of troubles.
    pub fn notices(self, notices: Notices) -> Self {
        Self { notices, ..self }
    }

    /// The model with the speed of its disk.
    pub fn disk_speed(self, disk_speed: Option<f64>) -> Self {
        Self { disk_speed, ..self }
    }
}

/// Failure to load a model.
pub type LoadError = Box<dyn StdError + Send + Sync>;

/// Second half of a load: from open files to a running core.
pub type StartModel = Box<dyn FnOnce() -> Result<LoadedModel, LoadError> + Send>;

/// Loads models, on a thread for it.
pub trait ModelLoader: Send + 'static {
    /// Opens the files of a model, of which little is in memory then. The model that was loaded
    /// before is unloaded between this and the returned function, so that a model whose files are
    /// wrong ends nothing.
    ///
    /// # Errors
    /// The files cannot be opened.
    fn open(&mut self, model: &OfferedModel) -> Result<StartModel, LoadError>;
}

/// List of models that cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelsError {
    /// There is none.
    #[error("there are no models")]
    Empty,
    /// Two models have one name.
    #[error("the name {name:?} is that of two models: rename one, or change its aliases")]
    Ambiguous {
        /// The name.
        name: String,
    },
}

/// Models that a server serves.
pub struct Models {
    pub(super) offered: Vec<OfferedModel>,
    pub(super) source: ModelSource,
    pub(super) waiting: usize,
}

/// Origin of loaded models.
pub(super) enum ModelSource {
    /// The only one, which stays loaded.
    Loaded(Box<LoadedModel>),
    Loader(Box<dyn ModelLoader>),
}

impl fmt::Debug for Models {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Models").field("offered", &self.offered).finish_non_exhaustive()
    }
}

impl Models {
    /// One model, which stays loaded. Requests may call it by any name.
    ///
    /// # Errors
    /// It has no tokenizer.
    pub fn one(name: impl Into<String>, model: LoadedModel) -> Result<Self, Error> {
        let engine = model.core.engine();
        engine.text()?;
        let offered = vec![OfferedModel::new(name, engine.folder())];
        let source = ModelSource::Loaded(Box::new(model));
        Ok(Self { offered, source, waiting: WAITING })
    }

    /// Models that are loaded when a request names them, one at a time.
    ///
    /// # Errors
    /// There is none, or two have the same name.
    pub fn several(
        offered: Vec<OfferedModel>,
        loader: impl ModelLoader,
    ) -> Result<Self, ModelsError> {
        if offered.is_empty() {
            return Err(ModelsError::Empty);
        }
        let names = |model: &OfferedModel| {
            let mut names = [&[model.name.clone()][..], &model.aliases].concat();
            names.sort();
            names.dedup();
            names
        };
        let mut names: Vec<String> = offered.iter().flat_map(names).collect();
        names.sort();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(ModelsError::Ambiguous { name: pair[0].clone() });
        }
        let source = ModelSource::Loader(Box::new(loader));
        Ok(Self { offered, source, waiting: WAITING })
    }

    /// The models with a number of requests that may wait for another model; default 64.
    pub fn waiting(self, waiting: usize) -> Self {
        Self { waiting, ..self }
    }

    /// The models.
    pub fn offered(&self) -> &[OfferedModel] {
        &self.offered
    }
}
