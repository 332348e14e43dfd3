//! A remote-expert function alone: its refusals and its termination.

use remoe_model::Checkpoint;
use remoe_proto::v1::forward_reply::Outcome;
use remoe_proto::v1::{Code, Work};
use remoe_test_support::checkpoint::{Sizes, generate};
use remoe_test_support::deadline::SOON;
use remoe_test_support::expert_stream::{ExpertStream, describe};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{RemoteFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::placement::all_experts;
use rustix::process::Signal;
use std::time::Duration;
use tempfile::TempDir;

/// Model whose experts take long for a large message.
fn slow_model() -> TempDir {
    generate(Sizes { layers: 1, hidden: 256, width: 2048, experts: 2, top_k: 1, vocabulary: 64, context: 64 })
}

/// Returns work of `rows` rows for experts 0 and 1 of layer 0 of the slow model.
fn slow_work(id: u64, rows: usize) -> Work {
    Work {
        id,
        rows: vec![0; rows * 256 * 4].into(),
        counts: vec![2; rows],
        experts: [0, 1].repeat(rows),
        ..Work::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn oversized_expert_set_is_refused_with_missing_bytes() {
    let model = ModelFixture::fixture("mixtral-basic");
    let experts = all_experts(&model.checkpoint());
    let limit = |bytes: u64| StartOptions::default().with("--memory-bytes", bytes);
    let function = RemoteFunction::start(&model.folder, &experts, StartOptions::default()).await;
    let needed = describe(function.address()).await.memory_bytes;
    drop(function);
    for missing in [1, 1000, needed - 1] {
        let (status, log) = RemoteFunction::refuse(&model.folder, &experts, limit(needed - missing)).await;
        assert_eq!(status.code(), Some(3), "{log:?}");
        let last = log.last().unwrap();
        assert!(last.contains(&format!(" {missing} bytes too many")), "{last}");
    }
    let function = RemoteFunction::start(&model.folder, &experts, limit(needed)).await;
    let description = describe(function.address()).await;
    assert_eq!((description.memory_bytes, description.memory_limit_bytes), (needed, needed));
}

#[tokio::test(flavor = "multi_thread")]
async fn experts_that_do_not_exist_are_refused() {
    let model = ModelFixture::fixture("mixtral-basic");
    for (listing, words) in
        [("0:1,99", ["99", "layer 0"]), ("17:0", ["17", "layer"]), ("0:x", ["0:x", "LAYER"])]
    {
        let (status, log) = RemoteFunction::refuse(&model.folder, listing, StartOptions::default()).await;
        assert!(!status.success(), "{listing}");
        let last = log.last().unwrap();
        assert!(words.iter().all(|word| last.contains(word)), "{listing}: {last}");
    }
}

/// Change that makes a valid request invalid.
type WorkChange = fn(&mut Work);

/// Invalid requests for expert 1 of layer 0, the only hosted expert.
fn work(checkpoint: &Checkpoint, id: u64) -> Work {
    let row = 0.5_f32.to_le_bytes().repeat(checkpoint.config().hidden_size);
    Work { id, rows: row.into(), counts: vec![1], experts: vec![1], ..Work::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn contradictory_requests_are_refused_and_stream_continues() {
    let model = ModelFixture::fixture("mixtral-basic");
    let checkpoint = model.checkpoint();
    let function = RemoteFunction::start(&model.folder, "0:1", StartOptions::default()).await;
    let mut stream = ExpertStream::open(function.address()).await;
    let good = stream.ask(work(&checkpoint, 1)).await.unwrap();
    assert_eq!(good.len(), checkpoint.config().hidden_size * 4);
    let row = work(&checkpoint, 0).rows;
    let changes: [(Code, WorkChange); 10] = [
        (Code::InvalidArgument, |work| work.rows = work.rows.slice(1..)),
        (Code::InvalidArgument, |work| work.rows = [&work.rows[..], &[0]].concat().into()),
        (Code::InvalidArgument, |work| work.counts = vec![1, 1]),
        (Code::InvalidArgument, |work| work.counts = vec![2]),
        (Code::InvalidArgument, |work| work.counts = vec![0]),
        (Code::InvalidArgument, |work| work.experts = vec![]),
        (Code::InvalidArgument, |work| *work = Work { id: work.id, ..Work::default() }),
        // The answer would exceed the largest message.
        (Code::InvalidArgument, |work| {
            work.counts = vec![1 << 16];
            work.experts = vec![1; 1 << 16];
        }),
        (Code::NotFound, |work| work.experts = vec![0]),
        (Code::NotFound, |work| work.layer = 9),
    ];
    for (id, (code, change)) in (2..).zip(changes) {
        let mut work = work(&checkpoint, id);
        change(&mut work);
        assert_eq!(stream.ask(work.clone()).await, Err(code), "{:?} {:?}", work.counts, work.experts);
        let again = Work { id: id + 1000, rows: row.clone(), ..self::work(&checkpoint, 0) };
        assert_eq!(stream.ask(again).await.as_ref(), Ok(&good), "after {code:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn work_in_flight_is_bounded_in_count_and_bytes() {
    let model = slow_model();
    let options = StartOptions::default().with("--max-in-flight", 2).with("--max-in-flight-bytes", 3 << 20);
    let function = RemoteFunction::start(model.path(), "0:0-1", options).await;
    let mut stream = ExpertStream::open(function.address()).await;
    // 1,024 rows and twice as many in the answer are 3 MiB; one more row exceeds the limit alone.
    assert_eq!(stream.ask(slow_work(1, 1025)).await, Err(Code::ResourceExhausted));
    for id in 2..=7 {
        stream.send(slow_work(id, 300));
    }
    let mut outcomes = Vec::new();
    for _ in 2..=7 {
        let (id, outcome) = stream.reply().await.unwrap();
        match outcome {
            Outcome::Rows(_) => outcomes.push((id, true)),
            Outcome::Failure(failure) => {
                assert_eq!((failure.code(), failure.retryable), (Code::ResourceExhausted, true));
                outcomes.push((id, false));
            }
        }
    }
    outcomes.sort_unstable();
    assert_eq!(outcomes.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 3, 4, 5, 6, 7]);
    assert_eq!(outcomes[..3], [(2, true), (3, true), (4, false)], "two are accepted, the next is not");
    assert!(stream.ask(slow_work(8, 1)).await.is_ok(), "there is room again");
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_requests_are_not_computed_and_late_ones_not_either() {
    let model = slow_model();
    let function = RemoteFunction::start(model.path(), "0:0-1", StartOptions::default()).await;
    let mut stream = ExpertStream::open(function.address()).await;
    stream.send(slow_work(1, 400));
    stream.send(slow_work(2, 400));
    stream.send(Work { budget_us: 1, ..slow_work(3, 1) });
    stream.send(slow_work(4, 1));
    stream.cancel(2);
    stream.cancel(77);
    let mut answers = Vec::new();
    for _ in 0..3 {
        let (id, outcome) = stream.reply().await.unwrap();
        let code = match outcome {
            Outcome::Rows(_) => None,
            Outcome::Failure(failure) => Some(failure.code()),
        };
        answers.push((id, code));
    }
    assert_eq!(answers, [(1, None), (3, Some(Code::DeadlineExceeded)), (4, None)]);
    let metrics = MetricsPage::read(function.announcement.metrics.unwrap()).await;
    let answered =
        |outcome: &str| metrics.value(&format!("remoe_function_answers_total{{outcome=\"{outcome}\"}}"));
    assert_eq!((answered("ok"), answered("cancelled"), answered("deadline_exceeded")), (2, 1, 1));
}

/// Returns work of `rows` different rows for experts 0 and 1 of layer 0 of the slow model, some for one expert only.
fn distinct_work(id: u64, rows: usize) -> Work {
    let values = (0..rows * 256).map(|at| ((id as usize * 31 + at * 7) % 101) as f32 / 50.0 - 1.0);
    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let mut work = Work { id, rows: bytes.into(), ..Work::default() };
    for row in 0..rows {
        let experts: &[u32] = [&[0, 1][..], &[1], &[0]][(row + id as usize) % 3];
        work.counts.push(experts.len() as u32);
        work.experts.extend(experts);
    }
    work
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_messages_are_computed_in_one_pass_bit_identically() {
    const MESSAGES: u64 = 24;
    let model = slow_model();
    let function = RemoteFunction::start(model.path(), "0:0-1", StartOptions::default()).await;
    let mut stream = ExpertStream::open(function.address()).await;
    let mut alone = Vec::new();
    for id in 1..=MESSAGES {
        alone.push(stream.ask(distinct_work(id, 20 + id as usize)).await.unwrap());
    }
    let reads = async || {
        let metrics = MetricsPage::read(function.announcement.metrics.unwrap()).await;
        metrics.value("remoe_function_expert_reads_total")
    };
    let before = reads().await;
    assert_eq!(before, 2 * MESSAGES, "each message by itself reads both experts");
    // The first request keeps the function busy while the others arrive.
    stream.send(slow_work(1000, 800));
    for id in 1..=MESSAGES {
        stream.send(Work { id: 2000 + id, ..distinct_work(id, 20 + id as usize) });
    }
    stream.cancel(2007);
    let mut answered = Vec::new();
    while answered.len() < MESSAGES as usize - 1 {
        let (id, outcome) = stream.reply().await.unwrap();
        let Outcome::Rows(rows) = outcome else { panic!("{id}: {outcome:?}") };
        if id != 1000 {
            assert_eq!(rows.rows, alone[id as usize - 2001], "message {id}");
            answered.push(id);
        }
    }
    let expected: Vec<u64> = (2001..=2000 + MESSAGES).filter(|&id| id != 2007).collect();
    assert_eq!(answered, expected, "one answer each, in the order of arrival");
    let reads = reads().await - before;
    assert!(reads < MESSAGES, "the weights were read {reads} times");
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_function_answers_accepted_requests() {
    const ACCEPTED: u64 = 12;
    let model = slow_model();
    let mut function = RemoteFunction::start(model.path(), "0:0-1", StartOptions::default()).await;
    let mut stream = ExpertStream::open(function.address()).await;
    for id in 1..=ACCEPTED {
        stream.send(slow_work(id, 400));
    }
    // Messages are read in order: the refusal of this one shows that the others were accepted.
    stream.send(Work { layer: 9, ..slow_work(100, 1) });
    let mut answered = Vec::new();
    let mut next = 1000;
    let mut refused = false;
    let mut signalled = false;
    loop {
        // Sends new work after the signal until some is refused.
        let reply = tokio::select! {
            reply = stream.reply() => reply,
            () = tokio::time::sleep(Duration::from_millis(5)), if signalled && !refused => {
                next += 1;
                stream.send(slow_work(next, 1));
                continue;
            }
        };
        let Some((id, outcome)) = reply else { break };
        match outcome {
            Outcome::Rows(rows) => {
                assert_eq!(rows.rows.len(), if id <= ACCEPTED { 400 * 2 * 1024 } else { 2 * 1024 });
                answered.push(id);
            }
            Outcome::Failure(failure) if id == 100 => {
                assert_eq!(failure.code(), Code::NotFound);
                assert!(answered.len() < 3, "the work is too small for this test");
                function.process.signal(Signal::TERM);
                signalled = true;
            }
            Outcome::Failure(failure) => {
                assert_eq!((failure.code(), failure.retryable), (Code::Draining, true));
                refused = true;
            }
        }
    }
    assert!(refused, "new work was accepted to the end");
    answered.retain(|id| *id <= ACCEPTED);
    assert_eq!(answered, (1..=ACCEPTED).collect::<Vec<_>>(), "everything that was accepted is answered");
    assert_eq!(function.process.end(SOON).await.code(), Some(0));
}
