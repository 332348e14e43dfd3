//! Functions with too few system resources: a clear message and exit code, which does not blame the checkpoint, and
//! no panic.

use remoe_test_support::binaries;
use remoe_test_support::deadline::SOON;
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::process::Process;
use rustix::process::Signal;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Mutex};
use tokio::time::{Duration, Instant, sleep};

/// Starts a function under `limit` (in the form of `ulimit`). Returns its exit status and log, or `None` if it became
/// ready.
async fn begin(program: &str, model: &Path, limit: &str) -> Option<(ExitStatus, Vec<String>)> {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("ulimit {limit} && exec \"$0\" \"$@\"")).arg(binaries::program(program));
    command.args(["--threads", "2"]).arg("--model").arg(model);
    match program {
        "remote-expert-fn" => command.args(["--experts", "0:0-1"]),
        _ => command.args(["--http-listen", "127.0.0.1:0"]),
    };
    command.env_remove("REMOE_LOG").env_remove("REMOE_API_KEY");
    let announced = Arc::<Mutex<bool>>::default();
    let seen = announced.clone();
    let mut process = Process::start(program, command, move |_| *seen.lock().unwrap() = true);
    let deadline = Instant::now() + SOON;
    while process.ended().is_none() {
        if *announced.lock().unwrap() {
            process.signal(Signal::TERM);
            process.end(SOON).await;
            return None;
        }
        assert!(Instant::now() < deadline, "{program} under {limit} neither begins nor ends");
        sleep(Duration::from_millis(5)).await;
    }
    let status = process.end(SOON).await;
    Some((status, process.log()))
}

#[tokio::test(flavor = "multi_thread")]
async fn too_few_open_files_are_a_failure_of_the_run_with_what_to_do() {
    let model = ModelFixture::fixture("mixtral-basic");
    for program in ["remote-expert-fn", "main-model-fn"] {
        let mut of_files = 0;
        // Below 5, the system's program loader fails.
        for limit in 5..=24 {
            let Some((status, log)) = begin(program, &model.folder, &format!("-n {limit}")).await else {
                continue;
            };
            assert_eq!(status.code(), Some(1), "{program} with {limit} files: {log:?}");
            let last = log.iter().rfind(|line| line.contains("ERROR")).unwrap();
            assert!(last.contains("Too many open files"), "{limit}: {last}");
            if last.contains("cannot read") {
                assert!(last.contains("ulimit -n"), "{limit}: {last}");
                of_files += 1;
            }
        }
        assert!(of_files > 0, "no limit stopped {program} at a file of the checkpoint");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn address_space_shortage_exits_3_and_states_missing_bytes() {
    let model = ModelFixture::fixture("mixtral-basic");
    let mut refused = 0;
    // In KiB. Below it, the system's loader cannot map the program, whose size depends on the compiler.
    let size = std::fs::metadata(binaries::program("remote-expert-fn")).unwrap().len() / 1024;
    for limit in (size + 3_600..=size + 100_000).step_by(6_000) {
        let Some((status, log)) = begin("remote-expert-fn", &model.folder, &format!("-v {limit}")).await
        else {
            continue;
        };
        assert_eq!(status.code(), Some(3), "{limit} KiB: {log:?}");
        let last = log.last().unwrap();
        assert!(last.contains("address space") && last.contains("ulimit -v"), "{limit} KiB: {last}");
        refused += 1;
    }
    assert!(refused >= 3, "only {refused} limits were refused");
}

/// No process may write to the pipes.
#[tokio::test(flavor = "multi_thread")]
async fn pipes_in_place_of_model_files_end_the_load() {
    let model = ModelFixture::fixture("mixtral-basic");
    for name in ["config.json", "model.safetensors"] {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(&model.folder).unwrap().map(Result::unwrap) {
            if entry.file_name() != name && entry.path().is_file() {
                std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
            }
        }
        let pipe = folder.path().join(name);
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for program in ["remote-expert-fn", "main-model-fn"] {
            let (status, log) = begin(program, folder.path(), "-n 256").await.unwrap();
            assert_eq!(status.code(), Some(4), "{program}: {log:?}");
            let last = log.last().unwrap();
            assert!(last.contains(&*pipe.to_string_lossy()) && last.contains("not a regular file"), "{last}");
        }
    }
}
