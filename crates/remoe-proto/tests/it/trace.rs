//! Compatibility of caller spans on the wire with functions that do not know them.

use prost::Message;
use remoe_proto::v1::Work;

/// `Work` before spans were added.
#[derive(Clone, PartialEq, Message)]
struct LegacyWork {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    generation: u64,
    #[prost(uint32, tag = "3")]
    layer: u32,
    #[prost(uint32, tag = "4")]
    budget_us: u32,
    #[prost(bytes = "vec", tag = "5")]
    rows: Vec<u8>,
    #[prost(uint32, repeated, tag = "6")]
    counts: Vec<u32>,
    #[prost(uint32, repeated, tag = "7")]
    experts: Vec<u32>,
}

#[test]
fn peer_without_spans_decodes_the_same_work() {
    let before = LegacyWork {
        id: 7,
        generation: 3,
        layer: 2,
        budget_us: 900,
        rows: vec![1, 2, 3, 4],
        counts: vec![2],
        experts: vec![5, 300],
    };
    let plain = Work::decode(&*before.encode_to_vec()).unwrap();
    assert!(plain.trace.is_empty());
    assert_eq!(plain.encode_to_vec(), before.encode_to_vec(), "not a byte for who is not traced");
    let traced = Work { trace: vec![9; 48].into(), ..plain };
    assert_eq!(traced.encoded_len(), before.encoded_len() + 50);
    assert_eq!(LegacyWork::decode(&*traced.encode_to_vec()).unwrap(), before);
}
