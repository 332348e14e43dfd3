use remoe_experiments::map::*;
use remoe_profile::*;
fn main() {
    let only = std::env::args().nth(1).unwrap_or_default();
    let pr = Prices::from_yaml(&std::fs::read_to_string("examples/pricing/gke-autopilot.yaml").unwrap())
        .unwrap()
        .pricing_apart()
        .unwrap();
    let list = NodeList::from_yaml(&std::fs::read_to_string("examples/nodes/gcp-us-central1.yaml").unwrap())
        .unwrap();
    let show = |c: &Cell, s: f64| {
        println!(
            "{:18} {:>7} {:?} saving {:?} [{:.1}s] {}",
            c.model,
            c.per_day,
            c.best,
            c.saving.map(|s| (s * 1000.0).round() / 10.0),
            s,
            c.offers
                .iter()
                .map(|o| format!(
                    "{:?}:{}{}",
                    o.way,
                    o.dollars_per_hour.map_or("-".into(), |d| format!("{d:.3}")),
                    if o.sleeps { "z" } else { "" }
                ))
                .collect::<Vec<_>>()
                .join(" ")
        )
    };
    for r in UnitRegime::all(pr) {
        if !r.name.starts_with(&only) {
            continue;
        }
        println!("== {}", r.name);
        for s in Subject::all() {
            for d in PER_DAY {
                let t = std::time::Instant::now();
                let c = r.cell(&s, d).unwrap();
                show(&c, t.elapsed().as_secs_f64());
            }
        }
    }
    if let Some(t) = std::env::args().nth(2) {
        let t: f64 = t.parse().unwrap();
        for r in ListRegime::all(&list) {
            for s in Subject::all() {
                let mut q = rental(&s, &r.nodes, r.slo, None);
                q.slo.tpot_seconds = t;
                let a = remoe_planner::rent(&q).unwrap();
                println!(
                    "{} {} {} | {}",
                    r.name,
                    s.name,
                    a.verdict.sentence,
                    a.verdict
                        .rivals
                        .iter()
                        .map(|v| format!(
                            "{:?}:{} [{}]",
                            v.name,
                            v.dollars_per_hour.map_or("-".into(), |d| format!("{d:.2}")),
                            v.why
                        ))
                        .collect::<Vec<_>>()
                        .join("; ")
                );
            }
        }
        return;
    }
    for r in ListRegime::all(&list) {
        if !r.name.starts_with(&only) {
            continue;
        }
        println!("== {}", r.name);
        for s in Subject::all() {
            for d in PER_DAY {
                let t = std::time::Instant::now();
                let c = r.cell(&s, d).unwrap();
                show(&c, t.elapsed().as_secs_f64());
            }
        }
    }
}
