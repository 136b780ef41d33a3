//! The cache folder that the Hub's tools share.
//!
//! ```text
//! models--ORG--NAME/blobs/DIGEST                  contents
//! models--ORG--NAME/snapshots/COMMIT/FILE         link to contents
//! models--ORG--NAME/refs/main                     commit of a branch or tag
//! .locks/models--ORG--NAME/DIGEST.lock            held while contents are downloaded
//! ```

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    digest::Digest,
    error::HubError,
    file_path::FilePath,
    listing::Listing,
    model_name::{HEAD, ModelName},
    partial_file::PART,
    selection::{Chosen, Selection},
};

/// The cache folder.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// A model of the cache.
#[derive(Clone, Debug)]
pub struct CachedModel {
    /// The model.
    pub name: ModelName,
    /// Folder of the snapshot.
    pub folder: PathBuf,
    /// Commit of the snapshot.
    pub commit: String,
    /// Branches and tags that stand for the commit.
    pub references: Vec<String>,
    /// The files, sorted by path.
    pub files: Vec<CachedFile>,
    /// Number of the repository's files whose download was begun and not finished.
    pub unfinished: usize,
}

/// A file of a snapshot.
#[derive(Clone, Debug)]
pub struct CachedFile {
    /// Path in the repository.
    pub path: FilePath,
    /// Size in bytes.
    pub size: u64,
}

/// Folder of one repository in the cache.
#[derive(Clone, Debug)]
pub(crate) struct RepositoryFolder {
    folder: PathBuf,
    locks: PathBuf,
}

impl Cache {
    /// The cache in a folder, which need not exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn repository(&self, model: &ModelName) -> RepositoryFolder {
        RepositoryFolder {
            folder: self.root.join(model.folder()),
            locks: self.root.join(".locks").join(model.folder()),
        }
    }

    /// The snapshot of a model's revision, of a variant its files alone. `None` if it is not in the
    /// cache.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn find(&self, model: &ModelName) -> Result<Option<CachedModel>, HubError> {
        let repository = self.repository(model);
        let revision = model.revision().unwrap_or(HEAD);
        let Some(commit) = repository.commit(revision) else { return Ok(None) };
        let Some(mut cached) = repository.snapshot(model.clone(), commit)? else { return Ok(None) };
        if model.variant().is_some() {
            let Some(chosen) = cached.chosen()? else { return Ok(None) };
            cached.files.retain(|file| chosen.files.contains(&file.path));
        }
        Ok(Some(cached))
    }

    /// File or folder of a model that `--model` takes: the snapshot, or the chosen GGUF file.
    ///
    /// # Errors
    /// The model is not in the cache, or has no such file.
    pub fn locate(&self, model: &ModelName) -> Result<Option<PathBuf>, HubError> {
        let Some(cached) = self.find(model)? else { return Ok(None) };
        Ok(cached.chosen()?.map(|chosen| chosen.location(&cached.folder)))
    }

    /// All snapshots, sorted by name. A repository of which nothing is complete has one without a
    /// commit.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn models(&self) -> Result<Vec<CachedModel>, HubError> {
        let mut models = Vec::new();
        for folder in names(&self.root)? {
            let Some(name) = ModelName::from_folder(&folder) else { continue };
            let repository = self.repository(&name);
            let before = models.len();
            for commit in names(&repository.folder.join("snapshots"))? {
                models.extend(repository.snapshot(name.clone(), commit)?);
            }
            let unfinished = repository.unfinished()?;
            if models.len() == before && unfinished > 0 {
                models.push(CachedModel {
                    name,
                    folder: repository.folder,
                    commit: String::new(),
                    references: Vec::new(),
                    files: Vec::new(),
                    unfinished,
                });
            }
        }
        models.sort_by_key(|model| (model.name.repository().to_lowercase(), model.commit.clone()));
        Ok(models)
    }

    /// Checks that a model, or a part of it, is in the cache.
    ///
    /// # Errors
    /// It is not.
    pub fn check(&self, model: &ModelName) -> Result<(), HubError> {
        if self.repository(model).folder.is_dir() {
            return Ok(());
        }
        Err(HubError::NotCached { name: model.repository(), folder: self.root.clone() })
    }

    /// Removes all snapshots of a model. Returns the bytes that are freed.
    ///
    /// # Errors
    /// It is not in the cache, or a file cannot be removed.
    pub fn remove(&self, model: &ModelName) -> Result<u64, HubError> {
        self.check(model)?;
        let RepositoryFolder { folder, locks } = self.repository(model);
        let freed = size_of_tree(&folder.join("blobs"));
        fs::remove_dir_all(&folder).map_err(HubError::file(&folder, "removing"))?;
        match fs::remove_dir_all(&locks) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(HubError::file(locks, "removing")(error))
            }
            _ => Ok(freed),
        }
    }
}

impl CachedModel {
    /// The files that the model needs; `None` if they are not there.
    fn chosen(&self) -> Result<Option<Chosen>, HubError> {
        let paths: Vec<_> = self.files.iter().map(|file| &file.path).collect();
        match Selection::default().select(&self.name, &paths) {
            Ok(chosen) => Ok(Some(chosen)),
            Err(HubError::NothingSelected { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl RepositoryFolder {
    /// The commit that a revision stands for.
    fn commit(&self, revision: &str) -> Option<String> {
        let path = FilePath::new(revision).ok()?;
        let text = fs::read_to_string(path.below(&self.folder.join("refs")));
        let commit = text.map_or_else(|_| revision.to_owned(), |text| text.trim().to_owned());
        matches!(Digest::from_tag(&commit), Some(Digest::GitBlob(_))).then_some(commit)
    }

    /// Folder of a commit's snapshot.
    pub(crate) fn snapshot_folder(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    fn snapshot(&self, name: ModelName, commit: String) -> Result<Option<CachedModel>, HubError> {
        let folder = self.snapshot_folder(&commit);
        let mut files = Vec::new();
        collect_files(&folder, "", &mut files)?;
        files.sort_by(|a, b| a.path.cmp(&b.path));
        if files.is_empty() {
            return Ok(None);
        }
        let references = self.references(&commit)?;
        let unfinished = self.unfinished()?;
        Ok(Some(CachedModel { name, folder, commit, references, files, unfinished }))
    }

    /// Number of files that were begun, by this program or by the Hub's own tools.
    fn unfinished(&self) -> Result<usize, HubError> {
        let blobs = names(&self.folder.join("blobs"))?;
        let is_part =
            |name: &&String| [PART, ".incomplete"].iter().any(|ending| name.ends_with(ending));
        Ok(blobs.iter().filter(is_part).count())
    }

    /// Branches and tags of a commit.
    fn references(&self, commit: &str) -> Result<Vec<String>, HubError> {
        let folder = self.folder.join("refs");
        let mut files = Vec::new();
        collect_files(&folder, "", &mut files)?;
        let stands = |file: &CachedFile| {
            fs::read_to_string(file.path.below(&folder)).is_ok_and(|text| text.trim() == commit)
        };
        Ok(files.iter().filter(|file| stands(file)).map(|file| file.path.to_string()).collect())
    }

    /// File of contents with a digest or tag.
    pub(crate) fn blob(&self, tag: &str) -> PathBuf {
        self.folder.join("blobs").join(tag)
    }

    /// Lock file of contents, as `huggingface_hub` names it.
    pub(crate) fn lock(&self, tag: &str) -> PathBuf {
        self.locks.join(format!("{tag}.lock"))
    }

    /// Makes the folders of contents and locks.
    ///
    /// # Errors
    /// They cannot be made.
    pub(crate) fn create(&self) -> Result<(), HubError> {
        for folder in [self.folder.join("blobs"), self.locks.clone()] {
            fs::create_dir_all(&folder).map_err(HubError::file(&folder, "creating"))?;
        }
        Ok(())
    }

    /// Whether contents have their name in a snapshot, judged by their size.
    pub(crate) fn is_linked(&self, commit: &str, path: &FilePath, tag: &str) -> bool {
        let size = |path: &Path| fs::metadata(path).map(|metadata| metadata.len()).ok();
        let linked = size(&path.below(&self.snapshot_folder(commit)));
        linked.is_some() && linked == size(&self.blob(tag))
    }

    /// Gives contents their name in a snapshot. Where links cannot be made, they are copied. The
    /// caller holds the lock of the contents.
    ///
    /// # Errors
    /// The link cannot be made.
    pub(crate) fn link(&self, commit: &str, path: &FilePath, tag: &str) -> Result<(), HubError> {
        if self.is_linked(commit, path, tag) {
            return Ok(());
        }
        let link = path.below(&self.snapshot_folder(commit));
        let blob = self.blob(tag);
        if let Some(folder) = link.parent() {
            fs::create_dir_all(folder).map_err(HubError::file(folder, "creating"))?;
        }
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(HubError::file(link, "replacing")(error));
            }
            _ => {}
        }
        let up = "../".repeat(path.depth() + 2);
        // Windows may make a link and not follow it, by a policy.
        if symlink(&format!("{up}blobs/{tag}"), &link).is_ok() && link.exists() {
            return Ok(());
        }
        let _ = fs::remove_file(&link);
        fs::hard_link(&blob, &link)
            .or_else(|_| fs::copy(&blob, &link).map(|_| ()))
            .map_err(HubError::file(link, "linking"))
    }

    /// Records which commit a branch or tag stands for.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn record(&self, revision: &str, listing: &Listing) -> Result<(), HubError> {
        if revision == listing.commit {
            return Ok(());
        }
        let path = FilePath::new(revision)?.below(&self.folder.join("refs"));
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(HubError::file(folder, "creating"))?;
        }
        fs::write(&path, &listing.commit).map_err(HubError::file(&path, "writing"))
    }
}

#[cfg(unix)]
fn symlink(target: &str, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &str, link: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target.replace('/', "\\"), link)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_target: &str, _link: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Names in a folder, none if it does not exist.
fn names(folder: &Path) -> Result<Vec<String>, HubError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(HubError::file(folder, "reading the folder")(error)),
    };
    let names = entries.map(|entry| Ok(entry?.file_name().into_string().ok()));
    let names: io::Result<Vec<_>> = names.collect();
    let names = names.map_err(HubError::file(folder, "reading the folder"))?;
    Ok(names.into_iter().flatten().collect())
}

/// Adds the files below a folder, by their paths from the first. Links to nothing are left out.
fn collect_files(folder: &Path, prefix: &str, files: &mut Vec<CachedFile>) -> Result<(), HubError> {
    for name in names(folder)? {
        let path = folder.join(&name);
        let Ok(metadata) = fs::metadata(&path) else { continue };
        let Ok(relative) = FilePath::new(&format!("{prefix}{name}")) else { continue };
        if metadata.is_dir() {
            // A link to a folder could lead anywhere, also to itself.
            if !path.is_symlink() {
                collect_files(&path, &format!("{relative}/"), files)?;
            }
        } else {
            files.push(CachedFile { path: relative, size: metadata.len() });
        }
    }
    Ok(())
}

/// Bytes of the files in a folder.
fn size_of_tree(folder: &Path) -> u64 {
    let sizes = names(folder)
        .unwrap_or_default()
        .into_iter()
        .map(|name| fs::symlink_metadata(folder.join(name)).map_or(0, |metadata| metadata.len()));
    sizes.sum()
}
