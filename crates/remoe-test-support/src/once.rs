//! Shared read-only folders that are expensive to make: the first test of a run makes them, in any process.

use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::path::PathBuf;

/// Returns the folder `name` of this test run. The first caller fills it with `make`; others wait. A run is one of
/// cargo-nextest, or else this process.
pub async fn folder(name: &str, make: impl AsyncFnOnce(&std::path::Path)) -> PathBuf {
    let run = std::env::var("NEXTEST_RUN_ID").unwrap_or_else(|_| std::process::id().to_string());
    let parent = std::env::temp_dir().join(format!("remoe-tests-{run}"));
    fs::create_dir_all(&parent).expect("a folder for temporary files can be made");
    let lock = File::create(parent.join(format!("{name}.lock"))).expect("a lock can be made");
    // Each thread opens its own file, so the lock also works between tests of one process.
    let lock =
        tokio::task::spawn_blocking(move || flock(&lock, FlockOperation::LockExclusive).map(|()| lock));
    let _lock = lock.await.expect("the thread lives").expect("a lock can be taken");
    let folder = parent.join(name);
    if !folder.exists() {
        let unfinished = parent.join(format!("{name}.unfinished"));
        fs::create_dir_all(&unfinished).expect("a folder can be made");
        make(&unfinished).await;
        fs::rename(&unfinished, &folder).expect("a folder can be renamed");
    }
    folder
}
