//! History file: complete records are read after any damage.

use crate::model;

use remoe_predictor::record::RecordHeader;
use remoe_predictor::{UsageSample, UsageShares};
use remoe_usage::{HistoryStore, HistoryStoreError, StoredRequest, Tenant};
use std::collections::HashSet;
use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

const HIDDEN: usize = 4;
const LIMIT: u64 = 1 << 20;

fn header() -> RecordHeader {
    model::header(2, 4)
}

fn stored(number: u64) -> StoredRequest {
    let shares = |shift: u64| {
        let weights = (0..8).map(|cell| ((cell * 3 + number + shift) % 7) as f32).collect();
        UsageShares::from_weights(4, weights).unwrap()
    };
    let vector = (0..HIDDEN as u64).map(|at| ((at + number) % 5) as f32 / 4.0).collect();
    let decode = (!number.is_multiple_of(3)).then(|| shares(1));
    StoredRequest {
        number,
        tenant: Tenant::named("a"),
        usage: UsageSample { vector, prefill: shares(0), decode },
    }
}

fn open(folder: &Path, limit: u64) -> Result<(HistoryStore, Vec<StoredRequest>), HistoryStoreError> {
    let mut read = Vec::new();
    let store = HistoryStore::open(folder, &header(), HIDDEN, limit, |one| read.push(one))?;
    Ok((store, read))
}

fn assert_same(read: &[StoredRequest], numbers: impl Iterator<Item = u64>) {
    let expected: Vec<StoredRequest> = numbers.map(stored).collect();
    assert_eq!(read.len(), expected.len());
    for (read, expected) in read.iter().zip(&expected) {
        assert_eq!((read.number, read.tenant), (expected.number, expected.tenant));
        assert_eq!(read.usage.vector, expected.usage.vector, "quarters are exact in float16");
        assert_eq!(read.usage.decode.is_some(), expected.usage.decode.is_some());
        let pairs = read.usage.prefill.values().iter().zip(expected.usage.prefill.values());
        pairs.for_each(|(read, expected)| assert!((read - expected).abs() < 1e-4, "{read} {expected}"));
    }
}

#[test]
fn store_is_readable_by_its_owner_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experience");
    let mode = || path.metadata().unwrap().permissions().mode() & 0o777;
    // A file that an earlier version made readable for all.
    std::fs::write(&path, []).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    let (mut store, _) = open(folder.path(), 1000).unwrap();
    assert_eq!(mode(), 0o600);
    (1..100).for_each(|number| store.append(&stored(number), HashSet::new).unwrap());
    assert_eq!(mode(), 0o600, "nor after compaction");
}

#[test]
fn writer_killed_at_any_byte_loses_at_most_one_record() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experience");
    let mut ends = Vec::new();
    {
        let (mut store, _) = open(folder.path(), LIMIT).unwrap();
        ends.push(store.bytes());
        for number in 0..6 {
            store.append(&stored(number), HashSet::new).unwrap();
            ends.push(store.bytes());
        }
    }
    let whole = std::fs::read(&path).unwrap();
    assert_eq!(whole.len() as u64, ends[6]);
    for cut in 0..=whole.len() {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let kept = ends.iter().filter(|end| **end <= cut as u64).count().saturating_sub(1) as u64;
        let (mut store, read) = open(folder.path(), LIMIT).unwrap();
        assert_same(&read, 0..kept);
        store.append(&stored(9), HashSet::new).unwrap();
        drop(store);
        let (_, read) = open(folder.path(), LIMIT).unwrap();
        assert_same(&read, (0..kept).chain([9]));
    }
}

#[test]
fn process_killed_during_compaction_loses_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let (path, next) = (folder.path().join("experience"), folder.path().join("experience.next"));
    let limit = 800;
    let (mut store, _) = open(folder.path(), limit).unwrap();
    let mut last = 0_u64;
    // Records with decode steps take 65 bytes: the next one does not fit.
    while store.bytes() + 65 <= limit {
        store.append(&stored(last), HashSet::new).unwrap();
        last += 1;
    }
    let next_one = if last.is_multiple_of(3) { last + 1 } else { last };
    drop(store);
    let whole = std::fs::read(&path).unwrap();
    // The replacement file exists up to any byte.
    for cut in 0..=whole.len() {
        std::fs::write(&path, &whole).unwrap();
        std::fs::write(&next, &whole[..cut]).unwrap();
        let (mut store, read) = open(folder.path(), limit).unwrap();
        assert_same(&read, 0..last);
        // The same when a later writer rewrites it.
        store.append(&stored(next_one), || HashSet::from([last - 2, last - 1])).unwrap();
        drop(store);
        let (_, read) = open(folder.path(), limit).unwrap();
        assert_same(&read, [last - 2, last - 1, next_one].into_iter());
    }
}

#[test]
fn requests_of_one_tenant_are_erased_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (mut store, _) = open(folder.path(), LIMIT).unwrap();
    for number in 0..9_u64 {
        let tenant = Tenant::named(if number.is_multiple_of(2) { "a" } else { "b" });
        store.append(&StoredRequest { tenant, ..stored(number) }, HashSet::new).unwrap();
    }
    let bytes = store.bytes();
    store.forget(Tenant::named("c")).unwrap();
    assert_eq!(store.bytes(), bytes);
    store.forget(Tenant::named("b")).unwrap();
    store.append(&stored(9), HashSet::new).unwrap();
    drop(store);
    let (_, read) = open(folder.path(), LIMIT).unwrap();
    assert_same(&read, [0, 2, 4, 6, 8, 9].into_iter());
}

/// Variable with the folder of the writing process below.
const WRITER: &str = "REMOE_TEST_STORE_WRITER";
const SMALL: u64 = 2000;

/// Not a test: the writer that the next test starts and kills. It prints each number after its record was appended.
#[test]
fn writes_until_it_is_killed() {
    let Ok(folder) = std::env::var(WRITER) else { return };
    let (mut store, _) = open(Path::new(&folder), SMALL).unwrap();
    let capacity = store.capacity() as u64;
    for number in 0_u64.. {
        let wanted = || (number.saturating_sub(capacity)..number).collect();
        store.append(&stored(number), wanted).unwrap();
        eprintln!("{number}");
    }
}

#[test]
fn killed_process_loses_at_most_the_record_being_written() {
    for killed_after in [1, 2, 7, 20, 100, 333, 1500] {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "history_store::writes_until_it_is_killed", "--nocapture"])
            .env(WRITER, folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(writer.stderr.take().unwrap()).lines();
        (0..killed_after).for_each(|number| assert_eq!(lines.next().unwrap().unwrap(), number.to_string()));
        writer.kill().unwrap();
        writer.wait().unwrap();
        // Complete lines printed until then; the last line may be truncated.
        let said: Vec<u64> = lines.map_while(Result::ok).filter_map(|line| line.parse().ok()).collect();
        let last = said.iter().copied().fold(killed_after - 1, |last, said| last.max(said));
        let (store, read) = open(folder.path(), SMALL).unwrap();
        let (first, newest) = (read[0].number, read.last().unwrap().number);
        assert!(newest >= last, "{last} was appended, {newest} is there");
        assert!(
            first <= last.saturating_sub(store.capacity() as u64 - 1),
            "{first} is the first of {newest}"
        );
        assert_same(&read, first..=newest);
    }
}

#[test]
fn damaged_record_loses_only_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experience");
    let (mut store, _) = open(folder.path(), LIMIT).unwrap();
    let begin = store.bytes() as usize;
    (0..3).for_each(|number| store.append(&stored(number), HashSet::new).unwrap());
    drop(store);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[begin + 20] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let (store, read) = open(folder.path(), LIMIT).unwrap();
    assert_same(&read, 1..3);
    assert_eq!(store.damaged(), 1);
}

#[test]
fn file_stays_within_its_limit_and_keeps_wanted_requests() {
    let folder = tempfile::tempdir().unwrap();
    let limit = 4096;
    let (mut store, _) = open(folder.path(), limit).unwrap();
    let capacity = store.capacity() as u64;
    assert!(capacity > 8, "{capacity}");
    let total = 50 * capacity;
    for number in 0..total {
        // Even numbers stay wanted longer than odd ones.
        let wanted =
            || (number.saturating_sub(capacity)..number).filter(|number| number.is_multiple_of(2)).collect();
        store.append(&stored(number), wanted).unwrap();
        assert!(store.bytes() <= limit);
        assert_eq!(std::fs::metadata(folder.path().join("experience")).unwrap().len(), store.bytes());
    }
    drop(store);
    let (_, read) = open(folder.path(), limit).unwrap();
    assert_eq!(read.last().unwrap().number, total - 1);
    assert!(read.len() as u64 >= capacity / 2, "{} of {capacity}", read.len());
    assert!(read.iter().all(|one| *one == StoredRequest { usage: one.usage.clone(), ..stored(one.number) }));
}

#[test]
fn second_program_or_model_cannot_open_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = open(folder.path(), LIMIT).unwrap();
    assert!(matches!(open(folder.path(), LIMIT), Err(HistoryStoreError::Taken { .. })));
    drop(store);
    let other = RecordHeader { model: "cd".repeat(32), ..header() };
    let refused = HistoryStore::open(folder.path(), &other, HIDDEN, LIMIT, |_| ());
    assert!(matches!(refused, Err(HistoryStoreError::Other { .. })), "{refused:?}");
    std::fs::write(folder.path().join("experience"), "a user's notes").unwrap();
    assert!(matches!(open(folder.path(), LIMIT), Err(HistoryStoreError::Other { .. })));
    assert_eq!(std::fs::read(folder.path().join("experience")).unwrap(), b"a user's notes");
    assert!(matches!(open(&folder.path().join("small"), 100), Err(HistoryStoreError::TooSmall { .. })));
}
