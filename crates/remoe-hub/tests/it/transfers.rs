//! Tests of transfers: broken connections, failing servers, changed files, and processes that share a cache or are
//! killed.

use crate::support::{
    WEIGHTS, connect, connect_with, files, model, read, short_timeouts, start_copy, total_bytes, web,
};
use remoe_hub::{FetchTimeouts, StallLimit};
use remoe_model::{Checkpoint, FileRange, Store};
use remoe_test_support::checkpoint::{Sizes, generate};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Bytes that may be fetched in addition: alignment, and small gaps between ranges.
const SLACK: u64 = 48 << 10;

async fn weights(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join(WEIGHTS)).unwrap()
}

async fn prefetch(store: &Arc<remoe_hub::FetchedStore>, bytes: Range<u64>) -> Result<(), String> {
    let store = Arc::clone(store);
    let prefetched =
        tokio::task::spawn_blocking(move || store.prefetch(&[FileRange { file: WEIGHTS, bytes }]));
    prefetched.await.unwrap().map_err(|error| error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn only_wanted_ranges_are_fetched() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    let store = connect(&web.model(), work.path()).await.unwrap();
    let (one, other) = (10_000_000..12_000_000, 20_000_000..20_000_100);
    let ranges = [one, other];
    let wanted: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    for range in &ranges {
        prefetch(&store, range.clone()).await.unwrap();
    }
    let counted = content.take_counted().remove(WEIGHTS).unwrap();
    let first = 64 << 10;
    assert!((wanted + first..wanted + first + SLACK).contains(&counted.bytes), "{counted:?}");
    for asked in &counted.ranges[1..] {
        let near = |range: &Range<u64>| asked.start + SLACK > range.start && asked.end < range.end + SLACK;
        assert!(ranges.iter().any(near), "{asked:?}");
    }
    // Bytes in the cache are not requested again by another reader.
    let again = connect(&web.model(), work.path()).await.unwrap();
    prefetch(&again, ranges[0].clone()).await.unwrap();
    assert_eq!(content.bytes(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn checkpoint_reads_without_prefetch() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, _content) = web(model.path()).await;
    let store = connect(&web.model(), work.path()).await.unwrap();
    let folder = Checkpoint::open(model.path()).unwrap();
    let fetched = tokio::task::spawn_blocking(move || {
        let fetched = Checkpoint::open_in(store).unwrap();
        let expert = fetched.expert(0, 5).unwrap();
        (fetched.fingerprint().unwrap(), fetched.read(&expert.down.weight).unwrap())
    });
    let (fingerprint, bytes) = fetched.await.unwrap();
    assert_eq!(fingerprint, folder.fingerprint().unwrap());
    assert_eq!(bytes, folder.read(&folder.expert(0, 5).unwrap().down.weight).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_connections_resume() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    // Every response breaks off: a client that restarts from the beginning never ends.
    content.change(|faults| (faults.cut_after, faults.cuts) = (Some(300_000), usize::MAX));
    let store = connect(&web.model(), work.path()).await.unwrap();
    assert_eq!(read(&store, WEIGHTS).await.unwrap(), weights(model.path()).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_server_is_retried() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    let store = connect(&web.model(), work.path()).await.unwrap();
    for status in [503, 500, 429] {
        content.change(|faults| (faults.failures, faults.status) = (2, status));
        let at = u64::from(status) * 30_000;
        prefetch(&store, at..at + 1000).await.unwrap();
    }
    content.change(|faults| (faults.failures, faults.status) = (usize::MAX, 503));
    let stderr = prefetch(&store, 1_000_000..2_000_000).await.unwrap_err();
    assert!(stderr.contains(WEIGHTS) && stderr.contains("503"), "{stderr}");
    // A permanent error is not retried.
    content.change(|faults| (faults.failures, faults.status) = (1, 403));
    let stderr = prefetch(&store, 1_000_000..2_000_000).await.unwrap_err();
    assert!(stderr.contains("(403"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_server_is_given_up() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    let store = connect(&web.model(), work.path()).await.unwrap();
    read(&store, "config.json").await.unwrap();
    content.change(|faults| faults.hang = true);
    let stderr = prefetch(&store, 1_000_000..2_000_000).await.unwrap_err();
    assert!(stderr.contains("cannot reach"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stall_names_bytes_rate_and_flag() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    let stall_limit = StallLimit { after: Duration::from_millis(500), flag: "--patience" };
    // Without the stall limit, the attempts would take minutes.
    let timeouts = FetchTimeouts { attempts: 1000, ..short_timeouts().with_stall_limit(stall_limit) };
    let store = connect_with(&web.model(), work.path(), timeouts).await.unwrap();
    read(&store, "config.json").await.unwrap();
    // A pause of the reader does not count as a stall of the source.
    tokio::time::sleep(stall_limit.after * 2).await;
    prefetch(&store, 1_000_000..2_000_000).await.unwrap();
    content.change(|faults| faults.hang = true);
    let stderr = prefetch(&store, 3_000_000..4_000_000).await.unwrap_err();
    assert!(stderr.starts_with("no byte for 500ms (1."), "{stderr}");
    for part in [" MB arrived before, ", "/s): cannot reach ", WEIGHTS, "raise --patience to wait longer"] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_ranges_gives_small_files_only() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    content.change(|faults| faults.no_ranges = true);
    let store = connect(&web.model(), work.path()).await.unwrap();
    assert_eq!(read(&store, "config.json").await.unwrap(), files(model.path())["config.json"]);
    let stderr = read(&store, WEIGHTS).await.unwrap_err();
    assert!(stderr.contains("range requests"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_ranges_is_reported_once() {
    let sizes =
        Sizes { layers: 1, hidden: 128, width: 256, experts: 8, top_k: 2, vocabulary: 256, context: 64 };
    let (model, work) = (generate(sizes), tempfile::tempdir().unwrap());
    assert!(
        (64 << 10..16 << 20).contains(&total_bytes(model.path())),
        "longer than the first request, shorter than the limit of whole files"
    );
    let (web, content) = web(model.path()).await;
    let copied = async |to: &str| {
        let output =
            start_copy(&web.model(), &work.path().join(format!("of {to}")), &work.path().join(to), &[]);
        let output = output.wait().await;
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{stderr}");
        stderr.lines().filter(|line| line.contains("lacks range requests")).count()
    };
    assert_eq!(copied("one").await, 0);
    content.change(|faults| faults.no_ranges = true);
    assert_eq!(copied("other").await, 1);
    let copied_files = files(&work.path().join("other"));
    assert_eq!(copied_files[WEIGHTS], files(model.path())[WEIGHTS]);
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_are_never_mixed() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    for validators in [true, false] {
        content.change(|faults| faults.no_validators = !validators);
        let cache = work.path().join(validators.to_string());
        let store = connect(&web.model(), &cache).await.unwrap();
        prefetch(&store, 1_000_000..2_000_000).await.unwrap();
        let old = weights(model.path()).await;
        // Without ETag and date, only a different length shows the change.
        let new: Vec<u8> = old.iter().map(|byte| !byte).chain((!validators).then_some(0)).collect();
        std::fs::write(model.path().join(WEIGHTS), &new).unwrap();
        content.change(|faults| faults.version += 1);
        let stderr = prefetch(&store, 5_000_000..6_000_000).await.unwrap_err();
        assert!(stderr.contains("changed at its source"), "{stderr}");
        let fresh = connect(&web.model(), &cache).await.unwrap();
        assert_eq!(read(&fresh, WEIGHTS).await.unwrap(), new);
        // A reader with an open file continues with the version that it opened.
        let kept = Arc::clone(&store);
        let read = tokio::task::spawn_blocking(move || {
            let mut bytes = vec![0; 1_000_000];
            let file = kept.open(WEIGHTS).unwrap().unwrap();
            file.read_exact_at(&mut bytes, 1_000_000).unwrap();
            bytes
        });
        assert_eq!(read.await.unwrap(), old[1_000_000..2_000_000]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_share_a_fetch() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    // Slow enough for the processes to overlap.
    content.change(|faults| faults.bytes_per_second = Some(4 << 20));
    let cache = work.path().join("cache");
    let copies: Vec<_> = ["one", "two", "three"]
        .into_iter()
        .map(|to| start_copy(&web.model(), &cache, &work.path().join(to), &[]))
        .collect();
    for copy in copies {
        assert_eq!(copy.expect_files().await, files(model.path()));
    }
    assert_eq!(content.bytes(), total_bytes(model.path()));
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_fetch_is_resumed() {
    let (model, work) = (model(), tempfile::tempdir().unwrap());
    let (web, content) = web(model.path()).await;
    content.change(|faults| faults.bytes_per_second = Some(1 << 20));
    let cache = work.path().join("cache");
    let to = work.path().join("copy");
    let half = total_bytes(model.path()) / 2;
    let mut killed = start_copy(&web.model(), &cache, &to, &[]);
    tokio::time::timeout(Duration::from_secs(120), async {
        while content.bytes() < half {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    // A second process waits for the first one's bytes, and continues when it is killed.
    let waiting = start_copy(&web.model(), &cache, &work.path().join("other"), &[]);
    killed.kill();
    content.change(|faults| faults.bytes_per_second = None);
    assert_eq!(waiting.expect_files().await, files(model.path()));
    // Each connection may fetch unrecorded bytes twice: at most 1 MiB, and the bytes in flight.
    let connections = total_bytes(model.path()).div_ceil(8 << 20);
    assert!(content.bytes() < total_bytes(model.path()) + connections * (3 << 20), "{}", content.bytes());
    let before = content.bytes();
    assert_eq!(start_copy(&web.model(), &cache, &to, &[]).expect_files().await, files(model.path()));
    assert_eq!(content.bytes(), before);
}
