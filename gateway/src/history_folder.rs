//! Folder of model summaries and of the training history (expert usage of past requests), with a part for each
//! gateway.
//!
//! A gateway takes a part that no other gateway has, whatever its pod is called. If another part is much newer, it
//! begins with a copy of that: during an upgrade, new gateways start before the old ones end. Each gateway writes
//! expert usage to its own part, and reads that of all others.

use remoe_usage::HistoryStore;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Largest number of gateways that share a folder.
const MAX_GATEWAYS: usize = 256;
/// A part is replaced by a copy of another one that is newer by more than this time.
const COPY_IF_NEWER_BY: Duration = Duration::from_secs(3600);
/// Name of the lock file, which the gateway that has the part keeps locked.
const LOCK_FILE: &str = "lock";
/// Name of the file with the model summary, as a main function sent it.
const SUMMARY_FILE: &str = "primer";

/// Part of the folder that this gateway has until this is dropped.
#[derive(Debug)]
pub(crate) struct HistoryFolder {
    folder: PathBuf,
    lock: File,
}

impl HistoryFolder {
    /// Takes a part of `folder` that no other gateway has: the newest one if possible.
    ///
    /// # Errors
    /// The folder cannot be used, or all parts are taken.
    pub(crate) fn take(folder: &Path) -> io::Result<Self> {
        let parts: Vec<PathBuf> = (0..MAX_GATEWAYS).map(|number| folder.join(number.to_string())).collect();
        let existing = parts.iter().filter(|part| part.is_dir());
        let mut parts_by_age: Vec<(SystemTime, &PathBuf)> =
            existing.map(|part| (last_write(part), part)).collect();
        parts_by_age.sort();
        let unused = parts.iter().filter(|part| !part.exists());
        let mut candidates = parts_by_age.iter().rev().map(|(_, part)| *part).chain(unused);
        let part = candidates.find_map(|part| Self::lock(part).transpose());
        let part = part.ok_or_else(|| {
            io::Error::other(format!(
                "cannot use {}: {MAX_GATEWAYS} gateways share it already",
                folder.display()
            ))
        })??;
        let own_last_write = last_write(&part.folder);
        if let Some((last_write, last)) = parts_by_age.last()
            && last_write.duration_since(own_last_write).is_ok_and(|ahead| ahead > COPY_IF_NEWER_BY)
        {
            retain_folders(&part.folder, |_| false)?;
            if let Err(error) = copy_folders(last, &part.folder) {
                tracing::warn!(%error, "incomplete copy of another gateway's training history");
            }
        }
        Ok(part)
    }

    /// Locks the part `folder`. Returns `None` if another gateway has it.
    fn lock(folder: &Path) -> io::Result<Option<Self>> {
        std::fs::create_dir_all(folder)?;
        let lock = File::options().create(true).append(true).open(folder.join(LOCK_FILE))?;
        match lock.try_lock() {
            Ok(()) => Ok(Some(Self { folder: folder.to_owned(), lock })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Returns the folder of the deployment whose `MoEDemand` has this uid.
    pub(crate) fn of_deployment(&self, uid: &str) -> PathBuf {
        self.folder.join(uid)
    }

    /// Deletes the folders of all deployments except `uids`, in this part and in parts that no gateway has.
    pub(crate) fn keep_only(&self, uids: &[String]) -> io::Result<()> {
        let is_kept = |name: &str| uids.iter().any(|uid| uid == name);
        retain_folders(&self.folder, is_kept)?;
        for_unowned_parts(self.folder.parent().unwrap_or(&self.folder), |part| retain_folders(part, is_kept))
    }
}

impl Drop for HistoryFolder {
    fn drop(&mut self) {
        // A child process inherits the lock between fork and exec, so it is released explicitly.
        let _ = self.lock.unlock();
    }
}

/// Calls `work` with each part of `folder` that no gateway has, and holds the part's lock meanwhile.
fn for_unowned_parts(folder: &Path, mut work: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    for part in std::fs::read_dir(folder)? {
        let part = part?.path();
        // A part that a gateway has is locked through another file description, so this attempt fails.
        if let Ok(lock) = File::open(part.join(LOCK_FILE))
            && lock.try_lock().is_ok()
        {
            let result = work(&part);
            let _ = lock.unlock();
            result?;
        }
    }
    Ok(())
}

/// Returns the time of the last write to a file in `folder`, other than the lock file.
fn last_write(folder: &Path) -> SystemTime {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let times = entries.filter(|entry| entry.file_name() != LOCK_FILE).filter_map(|entry| {
        let about = entry.metadata().ok()?;
        if about.is_dir() { Some(last_write(&entry.path())) } else { about.modified().ok() }
    });
    times.max().unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Copies the folders of deployments. Files that disappear meanwhile are skipped. A file that is being written may be
/// copied incompletely, which its reader detects.
fn copy_folders(from: &Path, to: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        let (here, there) = (entry.path(), to.join(&name));
        let copied = match entry.file_type() {
            Ok(kind) if kind.is_dir() => {
                std::fs::create_dir_all(&there)?;
                copy_folders(&here, &there)
            }
            _ if name == LOCK_FILE || there.extension().is_some_and(|extension| extension == "next") => {
                Ok(())
            }
            _ => std::fs::copy(&here, &there).map(drop),
        };
        match copied {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Returns the files of other parts with the expert usage of requests of `model`, for the deployment whose own folder
/// is `folder`.
pub(crate) fn other_usage_files(folder: &Path, model: &str) -> Vec<PathBuf> {
    let (Some(uid), Some(own)) = (folder.file_name(), folder.parent()) else { return Vec::new() };
    let parts = own.parent().map(std::fs::read_dir).and_then(Result::ok).into_iter().flatten().flatten();
    let other_usage_files = parts.map(|part| part.path()).filter(|part| part != own);
    let mut files: Vec<PathBuf> = other_usage_files
        .take(MAX_GATEWAYS)
        .map(|part| HistoryStore::file_in(&part.join(uid).join(model)))
        .collect();
    files.sort();
    files
}

/// Calls `each` with the usage files of parts that no gateway has, and holds the part's lock meanwhile.
pub(crate) fn for_each_ended_usage_file(
    folder: &Path,
    model: &str,
    each: &mut dyn FnMut(&Path),
) -> io::Result<()> {
    let (Some(uid), Some(all)) = (folder.file_name(), folder.parent().and_then(Path::parent)) else {
        return Ok(());
    };
    for_unowned_parts(all, |part| {
        each(&HistoryStore::file_in(&part.join(uid).join(model)));
        Ok(())
    })
}

/// Deletes the training history of `model` from the `folder` of a deployment, and from its folders in parts that no
/// gateway has.
pub(crate) fn delete_history(folder: &Path, model: &str) -> io::Result<()> {
    let remove = |past: &Path| match std::fs::remove_dir_all(past) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    remove(&folder.join(model))?;
    match (folder.file_name(), folder.parent().and_then(Path::parent)) {
        (Some(uid), Some(all)) => for_unowned_parts(all, |part| remove(&part.join(uid).join(model))),
        _ => Ok(()),
    }
}

/// Reads the model summary in the folder of a deployment, if there is one.
pub(crate) fn read_model_summary(folder: &Path) -> io::Result<Option<Vec<u8>>> {
    match std::fs::read(folder.join(SUMMARY_FILE)) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes `summary` of `model` to the folder of a deployment atomically. Deletes the history of other models.
pub(crate) fn write_model_summary(folder: &Path, model: &str, summary: &[u8]) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let next = folder.join("primer.next");
    std::fs::write(&next, summary)?;
    std::fs::rename(next, folder.join(SUMMARY_FILE))?;
    retain_folders(folder, |name| name == model)
}

/// Removes the folders in `folder` whose names are not `wanted`.
fn retain_folders(folder: &Path, wanted: impl Fn(&str) -> bool) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && !entry.file_name().to_str().is_some_and(&wanted) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn dated(experience: &HistoryFolder, uid: &str, what: &[u8], hours_ago: u64) {
        write_model_summary(&experience.of_deployment(uid), "m", what).unwrap();
        let file =
            File::options().write(true).open(experience.of_deployment(uid).join(SUMMARY_FILE)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(3600 * hours_ago)).unwrap();
    }

    fn parts_by_age(experience: &HistoryFolder, uid: &str) -> Option<Vec<u8>> {
        read_model_summary(&experience.of_deployment(uid)).unwrap()
    }

    #[test]
    fn gateway_takes_over_the_history_across_upgrades() {
        let folder = tempfile::tempdir().unwrap();
        let first = HistoryFolder::take(folder.path()).unwrap();
        assert_eq!(parts_by_age(&first, "a"), None);
        dated(&first, "a", b"first", 9);
        // The second gateway starts before the first ends.
        let second = HistoryFolder::take(folder.path()).unwrap();
        assert_ne!(first.of_deployment("a"), second.of_deployment("a"));
        assert_eq!(parts_by_age(&second, "a").unwrap(), b"first");
        drop(first);
        dated(&second, "a", b"second", 1);
        let third = HistoryFolder::take(folder.path()).unwrap();
        assert_eq!(parts_by_age(&third, "a").unwrap(), b"second", "not the older summary of the free part");
        drop((second, third));
        // The part that was written last.
        let fourth = HistoryFolder::take(folder.path()).unwrap();
        assert_eq!(parts_by_age(&fourth, "a").unwrap(), b"second");
    }

    #[test]
    fn removed_deployments_are_forgotten_in_unowned_parts() {
        let folder = tempfile::tempdir().unwrap();
        let [mine, other_usage_files, left] = [(); 3].map(|()| HistoryFolder::take(folder.path()).unwrap());
        for experience in [&mine, &other_usage_files, &left] {
            dated(experience, "a", b"told", 0);
            dated(experience, "b", b"told", 0);
            std::fs::create_dir_all(experience.of_deployment("b").join("m")).unwrap();
        }
        let (its, past) = (left.of_deployment("a"), left.of_deployment("b").join("m"));
        drop(left);
        mine.keep_only(&["b".to_owned()]).unwrap();
        assert_eq!((parts_by_age(&mine, "a"), its.exists()), (None, false));
        assert!(
            parts_by_age(&mine, "b").is_some() && parts_by_age(&other_usage_files, "a").is_some(),
            "others forget by themselves"
        );
        delete_history(&mine.of_deployment("b"), "m").unwrap();
        assert!(
            !mine.of_deployment("b").join("m").exists()
                && !past.exists()
                && other_usage_files.of_deployment("b").join("m").exists()
        );
        // Writing the summary of another model deletes this model's history.
        std::fs::create_dir_all(mine.of_deployment("b").join("m")).unwrap();
        write_model_summary(&mine.of_deployment("b"), "n", b"another").unwrap();
        assert!(!mine.of_deployment("b").join("m").exists());
    }
}
