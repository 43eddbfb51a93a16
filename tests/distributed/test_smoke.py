import torchopt_dist as todist
def test_a(world):
    assert world(3).run(lambda: todist.get_rank()*2)==[0,2,4]
def test_b(world):
    assert world(2).on_zero(lambda: todist.remote_sync_call(pow,args=(2,5),partitioner=1))==[32]
