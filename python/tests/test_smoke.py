import forebay
import torch

def test_smoke(tmp_path):
    model = torch.nn.Linear(4, 3)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward(); optim.step()
    state = dict(model=model, optim=optim, n=3, t=torch.arange(5))
    with forebay.Checkpointer(tmp_path, every=1) as ck:
        save = ck.step(1, state)
        assert save.wait_durable(30)
        print(ck.steps())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters(): p.zero_()
    state["n"] = 0
    with forebay.Checkpointer(tmp_path) as ck:
        assert ck.restore(state) == 1
    assert state["n"] == 3
    for k, v in model.state_dict().items(): assert torch.equal(v, before[k])
