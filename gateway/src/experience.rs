//! The folder in which gateways keep what they know of models and of past requests, a part for each gateway.
//!
//! A gateway takes a part that no other one has, whatever its pod is called. If another part knows newer things, it
//! begins with a copy of them: the gateways of an upgrade start before those that they replace have ended. Each gateway
//! writes expert usage to its own part, and reads it from all the others.

use remoe_usage::HistoryStore;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Gateways that share a folder, at most.
const MOST_GATEWAYS: usize = 256;
/// A part is replaced by a copy of another one that is newer by more than this.
const MUCH_NEWER: Duration = Duration::from_secs(3600);
/// Lock file, held open and locked by the gateway that has the part.
const LOCK: &str = "lock";
/// The primer of a model, as a main function told it.
const PRIMER: &str = "primer";

/// One gateway's part, as long as this lives.
#[derive(Debug)]
pub(crate) struct Experience {
    folder: PathBuf,
    lock: File,
}

impl Experience {
    /// Takes a part of `folder` that no other gateway has.
    ///
    /// # Errors
    /// The folder cannot be used, or all parts are taken.
    pub(crate) fn take(folder: &Path) -> io::Result<Self> {
        let parts: Vec<PathBuf> = (0..MOST_GATEWAYS).map(|number| folder.join(number.to_string())).collect();
        let there = parts.iter().filter(|part| part.is_dir());
        let mut known: Vec<(SystemTime, &PathBuf)> = there.map(|part| (newest(part), part)).collect();
        known.sort();
        let fresh = parts.iter().filter(|part| !part.exists());
        let mut candidates = known.iter().rev().map(|(_, part)| *part).chain(fresh);
        let taken = candidates.find_map(|part| Self::lock(part).transpose());
        let taken = taken.ok_or_else(|| {
            io::Error::other(format!(
                "cannot use {}: {MOST_GATEWAYS} gateways share it already",
                folder.display()
            ))
        })??;
        let own = newest(&taken.folder);
        if let Some((newest, last)) = known.last()
            && newest.duration_since(own).is_ok_and(|ahead| ahead > MUCH_NEWER)
        {
            keep_folders(&taken.folder, |_| false)?;
            if let Err(error) = copy_folders(last, &taken.folder) {
                tracing::warn!(%error, "incomplete copy of another gateway's training history");
            }
        }
        Ok(taken)
    }

    /// Locks the part `folder`; none if another gateway has it.
    fn lock(folder: &Path) -> io::Result<Option<Self>> {
        std::fs::create_dir_all(folder)?;
        let lock = File::options().create(true).append(true).open(folder.join(LOCK))?;
        match lock.try_lock() {
            Ok(()) => Ok(Some(Self { folder: folder.to_owned(), lock })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Returns the folder of what is known of the deployment whose demand has this identity.
    pub(crate) fn of(&self, uid: &str) -> PathBuf {
        self.folder.join(uid)
    }

    /// Forgets all deployments whose demands are none of `uids`, also in the parts that no gateway has.
    pub(crate) fn keep_only(&self, uids: &[String]) -> io::Result<()> {
        let is_kept = |name: &str| uids.iter().any(|uid| uid == name);
        keep_folders(&self.folder, is_kept)?;
        unused(self.folder.parent().unwrap_or(&self.folder), |part| keep_folders(part, is_kept))
    }
}

impl Drop for Experience {
    fn drop(&mut self) {
        // A child that this process has just forked holds the lock as well, until it becomes another program.
        let _ = self.lock.unlock();
    }
}

/// Does `work` with the parts of `folder` that no gateway has, and holds their locks meanwhile.
fn unused(folder: &Path, mut work: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    for part in std::fs::read_dir(folder)? {
        let part = part?.path();
        // A part that a gateway has is open under another description, whose lock this one does not get.
        if let Ok(lock) = File::open(part.join(LOCK))
            && lock.try_lock().is_ok()
        {
            let worked = work(&part);
            let _ = lock.unlock();
            worked?;
        }
    }
    Ok(())
}

/// Returns when something in `folder` was last written.
fn newest(folder: &Path) -> SystemTime {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let times = entries.filter(|entry| entry.file_name() != LOCK).filter_map(|entry| {
        let about = entry.metadata().ok()?;
        if about.is_dir() { Some(newest(&entry.path())) } else { about.modified().ok() }
    });
    times.max().unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Copies what is known of deployments. What goes meanwhile is left out, and so is by its reader what was being
/// written.
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
            _ if name == LOCK || there.extension().is_some_and(|extension| extension == "next") => Ok(()),
            _ => std::fs::copy(&here, &there).map(drop),
        };
        match copied {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Returns the files in which other gateways store the expert usage of requests of `model` that they served, for the
/// deployment whose own folder is `folder`; also those of parts that no gateway has.
pub(crate) fn others(folder: &Path, model: &str) -> Vec<PathBuf> {
    let (Some(uid), Some(own)) = (folder.file_name(), folder.parent()) else { return Vec::new() };
    let parts = own.parent().map(std::fs::read_dir).and_then(Result::ok).into_iter().flatten().flatten();
    let others = parts.map(|part| part.path()).filter(|part| part != own);
    let mut files: Vec<PathBuf> =
        others.take(MOST_GATEWAYS).map(|part| HistoryStore::file_in(&part.join(uid).join(model))).collect();
    files.sort();
    files
}

/// Calls `each` with the files of [`others`] whose part no gateway has, and holds the part's lock meanwhile.
pub(crate) fn others_ended(folder: &Path, model: &str, each: &mut dyn FnMut(&Path)) -> io::Result<()> {
    let (Some(uid), Some(all)) = (folder.file_name(), folder.parent().and_then(Path::parent)) else {
        return Ok(());
    };
    unused(all, |part| {
        each(&HistoryStore::file_in(&part.join(uid).join(model)));
        Ok(())
    })
}

/// Removes the expert usage of past requests of `model` from the `folder` of a deployment, and from its folders in the
/// parts that no gateway has.
pub(crate) fn forget_past(folder: &Path, model: &str) -> io::Result<()> {
    let remove = |past: &Path| match std::fs::remove_dir_all(past) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    remove(&folder.join(model))?;
    match (folder.file_name(), folder.parent().and_then(Path::parent)) {
        (Some(uid), Some(all)) => unused(all, |part| remove(&part.join(uid).join(model))),
        _ => Ok(()),
    }
}

/// The primer in the folder of a deployment; `None` where there is none.
pub(crate) fn read_primer(folder: &Path) -> io::Result<Option<Vec<u8>>> {
    match std::fs::read(folder.join(PRIMER)) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Keeps `summary` there, whole or not at all, and nothing that is of other models than `model`.
pub(crate) fn keep_model_summary(folder: &Path, model: &str, summary: &[u8]) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let next = folder.join("primer.next");
    std::fs::write(&next, summary)?;
    std::fs::rename(next, folder.join(PRIMER))?;
    keep_folders(folder, |name| name == model)
}

/// Removes the folders in `folder` that are not `wanted`.
fn keep_folders(folder: &Path, wanted: impl Fn(&str) -> bool) -> io::Result<()> {
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

    fn dated(experience: &Experience, uid: &str, what: &[u8], hours_ago: u64) {
        keep_model_summary(&experience.of(uid), "m", what).unwrap();
        let file = File::options().write(true).open(experience.of(uid).join(PRIMER)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(3600 * hours_ago)).unwrap();
    }

    fn known(experience: &Experience, uid: &str) -> Option<Vec<u8>> {
        read_primer(&experience.of(uid)).unwrap()
    }

    #[test]
    fn a_gateway_inherits_from_the_one_before_upgrade_after_upgrade() {
        let folder = tempfile::tempdir().unwrap();
        let first = Experience::take(folder.path()).unwrap();
        assert_eq!(known(&first, "a"), None);
        dated(&first, "a", b"first", 9);
        // It starts before the other ends.
        let second = Experience::take(folder.path()).unwrap();
        assert_ne!(first.of("a"), second.of("a"));
        assert_eq!(known(&second, "a").unwrap(), b"first");
        drop(first);
        dated(&second, "a", b"second", 1);
        let third = Experience::take(folder.path()).unwrap();
        assert_eq!(known(&third, "a").unwrap(), b"second", "and not what the part knew that was free");
        drop((second, third));
        // What was written last.
        let fourth = Experience::take(folder.path()).unwrap();
        assert_eq!(known(&fourth, "a").unwrap(), b"second");
    }

    #[test]
    fn removed_deployments_are_forgotten_in_unowned_parts() {
        let folder = tempfile::tempdir().unwrap();
        let [mine, others, left] = [(); 3].map(|()| Experience::take(folder.path()).unwrap());
        for experience in [&mine, &others, &left] {
            dated(experience, "a", b"told", 0);
            dated(experience, "b", b"told", 0);
            std::fs::create_dir_all(experience.of("b").join("m")).unwrap();
        }
        let (its, past) = (left.of("a"), left.of("b").join("m"));
        drop(left);
        mine.keep_only(&["b".to_owned()]).unwrap();
        assert_eq!((known(&mine, "a"), its.exists()), (None, false));
        assert!(known(&mine, "b").is_some() && known(&others, "a").is_some(), "others forget by themselves");
        forget_past(&mine.of("b"), "m").unwrap();
        assert!(!mine.of("b").join("m").exists() && !past.exists() && others.of("b").join("m").exists());
        // Another model's past goes with the primer.
        std::fs::create_dir_all(mine.of("b").join("m")).unwrap();
        keep_model_summary(&mine.of("b"), "n", b"another").unwrap();
        assert!(!mine.of("b").join("m").exists());
    }
}
