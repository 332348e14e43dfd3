//! How long a remote function with 100 MB of experts in the page cache takes to start.

use super::work;
use crate::context::{BenchContext, warm};
use crate::error::{BenchError, ErrorContext, Result};
use crate::pace::TimeShare;
use crate::remote::RemoteFunction;
use crate::report::{Bar, BenchSection};
use crate::series::Series;
use remoe_kernels::{ExpertJob, Pool, PoolConfig};
use remoe_model::Checkpoint;
use remoe_proto::PollSettings;
use remoe_weights::{default_dtype, load_expert};
use serde_json::json;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Instant;

const NAME: &str = "Start of a remote function";
const STARTS: usize = 20;

/// Eight of OLMoE's experts are 100.7 MB.
const WIDTH: usize = 1024;

/// From the start of the process to its first answer, in milliseconds.
const BAR: Bar = Bar::AtMost(50.0);

pub(super) fn measure(context: &BenchContext, share: &TimeShare) -> Result<BenchSection> {
    let shape = work::shape(WIDTH);
    let model = context.model(&format!("one-layer-{WIDTH}"), &shape)?;
    let expected = expected(&model)?;
    let bytes = 3 * shape.hidden * WIDTH * shape.dtype.bytes() * work::EXPERTS as usize;
    warm(&model)?;
    let (mut announced, mut answered) = (Series::default(), Series::default());
    let (mut reported, mut reading) = (Series::default(), Series::default());
    let ending = share.rounds(NAME, context.rounds(STARTS), |number| {
        let read = read_again(&model)?;
        let started = Instant::now();
        let function = RemoteFunction::start(context, &model, work::LISTING, None)?;
        let announcement = started.elapsed();
        let mut forward_client = function.forward_client()?;
        let answer = forward_client
            .forward(work::one_token(1, shape.hidden), PollSettings::ENGINE)
            .doing(|| "asking a remote function")?;
        let first_answer = started.elapsed();
        if answer.rows != expected {
            return Err(BenchError::new("starting a remote function", "wrong first answer"));
        }
        // The first start warms up.
        if number > 0 {
            announced.push(announcement.as_secs_f64() * 1e3);
            answered.push(first_answer.as_secs_f64() * 1e3);
            reported.push(function.announcement.start_us as f64 / 1e3);
            reading.push(read * 1e3);
        }
        Ok(())
    });
    let mut part = BenchSection::new(
        NAME,
        json!({"starts": ending.done, "experts": work::EXPERTS, "hidden": shape.hidden, "width": WIDTH,
               "dtype": "bfloat16", "bytes": bytes}),
    );
    part.add("process start to announcement", "ms", &announced);
    part.add_with_bar("process start to first correct answer", "ms", &answered, BAR);
    part.add("of it reported by the function: start of main to readiness", "ms", &reported);
    part.add("limit: read() of the same file by one thread into reused memory", "ms", &reading);
    part.add("first answer / limit", "", &answered.over(&reading));
    part.note(format!(
        "{:.1} MB of experts in the page cache. The clock starts before the process is made and stops when \
         the answer to one token for all {} experts has been received, connecting included; each answer is \
         compared with the kernels' in this process, bit for bit.",
        bytes as f64 / 1e6,
        work::EXPERTS
    ));
    part.conclude(ending);
    Ok(part)
}

/// The answer as the kernels give it in this process.
fn expected(model: &Path) -> Result<Vec<u8>> {
    let computing = || "computing the expected answer";
    let checkpoint = Checkpoint::open(model).doing(computing)?;
    let dtype = default_dtype(&checkpoint);
    let request = work::one_token(1, checkpoint.config().hidden_size);
    let pool = Pool::new(PoolConfig::default()).doing(computing)?;
    let mut answer = Vec::new();
    for &expert in &request.experts {
        let packed = load_expert(&checkpoint, 0, expert, dtype).doing(computing)?;
        let mut output = vec![0; request.rows.len()];
        let job = ExpertJob { expert: &packed, inputs: &request.rows, row_index: &[0], output: &mut output };
        pool.forward(&mut [job]).doing(computing)?;
        answer.extend(output);
    }
    Ok(answer)
}

/// Seconds to read the weights from the page cache, a megabyte at a time.
fn read_again(model: &Path) -> Result<f64> {
    let reading = || format!("reading {}", model.display());
    let mut file = File::open(model.join("model.safetensors")).doing(reading)?;
    let mut buffer = vec![1; 1 << 20];
    let started = Instant::now();
    while file.read(&mut buffer).doing(reading)? > 0 {}
    Ok(started.elapsed().as_secs_f64())
}
