//! The thread that loads and unloads models: one step of the registry after another.

use std::sync::Arc;

use super::{
    loaded::ServedModel,
    models::{LoadError, ModelLoader},
    registry::{ModelRegistry, SwitchStep},
};

/// State of the thread.
pub(super) struct Switcher {
    pub(super) registry: Arc<ModelRegistry>,
    pub(super) loader: Box<dyn ModelLoader>,
}

/// Stops the registry when the thread ends, by a panic too: no request waits for ever.
struct StopAtEnd(Arc<ModelRegistry>);

impl Drop for StopAtEnd {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Switcher {
    /// Runs until the registry stops.
    pub(super) fn run(mut self) {
        let _stop = StopAtEnd(Arc::clone(&self.registry));
        while let Some(step) = self.registry.next_step() {
            match step {
                SwitchStep::Grant(grants) => grants.into_iter().for_each(|grant| grant.give()),
                SwitchStep::Unload(model) => unload(model),
                SwitchStep::Load(index) => {
                    let result = self.load(index);
                    self.registry.loaded(index, result);
                }
            }
        }
    }

    /// Loads a model in place of the current one, which stays if the files cannot be opened.
    fn load(&mut self, index: usize) -> Result<ServedModel, LoadError> {
        let offered = &self.registry.offered()[index];
        let start = self.loader.open(offered)?;
        self.registry.take_current().into_iter().for_each(unload);
        let options = self.registry.options().clone();
        Ok(ServedModel::new(&offered.name, start()?, options)?)
    }
}

/// Ends a model's threads, and frees its memory.
fn unload(model: Arc<ServedModel>) {
    model.join();
}
