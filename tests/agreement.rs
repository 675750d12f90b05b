//! Ranks that hold or were told different things, which no collective sees, are found before they do harm.

use shardgrad::nn::trainer::{Settings, Trainer};
use shardgrad::nn::{Init, Linear};
use shardgrad::prelude::*;

/// What one rank has that the others do not.
#[derive(Clone, Copy, PartialEq)]
enum Odd {
    Nothing,
    Rate,
    Seed,
    Step,
    Weight,
    Data,
    Arguments,
}

/// Makes a trainer on each rank, of which the last has something of its own, and compares.
fn compared(mesh: &str, odd: Odd) -> Result<()> {
    let ended = World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let odd = if rank.index() + 1 == rank.mesh().num_ranks() { odd } else { Odd::Nothing };
        let plan = Plan::data("dp");
        let read = |rank: &Rank, _: u64, rows: std::ops::Range<usize>| {
            let mut data = vec![0.5f32; rows.len() * 3];
            if odd == Odd::Data {
                data.fill(0.25);
            }
            let layout = plan.batch_layout(rank.mesh(), DType::F32, &[rows.len(), 3])?;
            let x = Tensor::from_global(rank, &layout, &data)?;
            Ok(vec![x; if odd == Odd::Arguments { 2 } else { 1 }])
        };
        let loss = |model: &Linear, x: &[Var]| model.forward(&x[0]).square().mean();
        let settings = Settings { seed: u64::from(odd == Odd::Seed), ..Settings::new(4) };
        let optim = AdamW::new(if odd == Odd::Rate { 0.2 } else { 0.1 });
        let model = Linear::new(3, 4).init(Init::Zeros);
        let mut trainer = Trainer::new(rank, model, &plan, optim, settings, read, loss)?;
        if odd == Odd::Step {
            trainer.skip_to(3);
        }
        if odd == Odd::Weight {
            let bias = trainer.model().bias.as_ref().expect("a linear layer has a bias by default");
            bias.set_tensor(Tensor::from_local(rank, &bias.layout(), &[0f32, 0.0, -0.0, 0.0])?)?;
        }
        trainer.check_alike()
    });
    ended.map(drop)
}

#[test]
fn each_difference_is_named() {
    for mesh in ["tp=2", "dp=2,tp=2", "dp=3"] {
        compared(mesh, Odd::Nothing).unwrap();
        for (odd, part) in [
            (Odd::Rate, "`optimizer`"),
            (Odd::Seed, "`settings`"),
            (Odd::Step, "`step`"),
            (Odd::Arguments, "`arguments of the loss`"),
            (Odd::Weight, "`bias` first"),
        ] {
            let error = compared(mesh, odd).unwrap_err();
            assert_eq!(error.kind(), Kind::Diverged, "{mesh}: {error}");
            assert!(error.to_string().contains(part), "{mesh}: {error}");
        }
    }
    for mesh in ["tp=2", "dp=2,tp=2"] {
        let error = compared(mesh, Odd::Data).unwrap_err();
        assert!(error.to_string().contains("`argument 0 of the loss` first"), "{error}");
    }
}
