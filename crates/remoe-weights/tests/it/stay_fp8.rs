//! Experts that stay as a checkpoint stores them in fp8.

use remoe_kernels::{Dtype, ExpertJob, Pool, PoolConfig};
use remoe_model::{Checkpoint, ExpertsDtype, StoredDtype};
use remoe_weights::{experts_class, load_expert};
use std::path::Path;

fn fixture(name: &str) -> Checkpoint {
    Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)).unwrap()
}

/// Experts give the bits of the same ones decoded, in half of the memory but for what narrow ones are padded with.
#[test]
fn experts_kept_as_fp8_compute_like_decoded_ones() {
    let checkpoint = fixture("dsv3-fp8");
    let pool = Pool::new(PoolConfig { threads: 1, ..PoolConfig::default() }).unwrap();
    let hidden = checkpoint.config().hidden_size;
    let rows: Vec<u8> =
        (0..9 * hidden as u32).flat_map(|k| (0x3c00 + (k * 37 % 512) as u16).to_le_bytes()).collect();
    for layer in checkpoint.config().moe_layers() {
        for expert in 0..checkpoint.config().moe(layer).unwrap().experts as u32 {
            let of = |experts| {
                let packed =
                    load_expert(&checkpoint, layer, expert, experts_class(Dtype::Bf16, experts)).unwrap();
                let mut output = vec![0; rows.len()];
                let row_index = [8, 7, 6, 5, 4, 3, 2, 1, 0];
                let job =
                    ExpertJob { expert: &packed, inputs: &rows, row_index: &row_index, output: &mut output };
                pool.forward(&mut [job]).unwrap();
                (output, packed.bytes())
            };
            let ((fp8, fewer), (decoded, bytes)) = (of(Some(ExpertsDtype::Fp8)), of(None));
            assert_eq!(fp8, decoded, "{layer}, {expert}");
            assert!(fewer < bytes * 3 / 4, "{fewer} of {bytes}");
        }
    }
}

#[test]
fn experts_that_cannot_stay_fp8_are_refused_by_name() {
    let refused = |name: &str, dtype| {
        let checkpoint = fixture(name);
        let refused = checkpoint.check_experts_dtype(Some(ExpertsDtype::Fp8), dtype);
        assert!(checkpoint.check_experts_dtype(Some(ExpertsDtype::Int8), dtype).is_ok());
        refused.map_err(|error| error.to_string())
    };
    assert_eq!(refused("dsv3-fp8", StoredDtype::Bf16), Ok(()));
    let says = |name, dtype, what: &str| {
        let error = refused(name, dtype).unwrap_err();
        assert!(error.contains("`quantization_config`") && error.contains(what), "{error}");
    };
    says("dsv3-fp8", StoredDtype::F32, "set --dtype bfloat16");
    says("qwen3moe-fp8", StoredDtype::Bf16, "fp8 block 8 x 16, expected multiples of 4 x 32");
    says("mixtral-bf16", StoredDtype::Bf16, "use int8, which takes as much memory");
    let error =
        load_expert(&fixture("mixtral-bf16"), 0, 0, experts_class(Dtype::Bf16, Some(ExpertsDtype::Fp8)));
    assert!(error.unwrap_err().to_string().contains("cannot keep"));
}
