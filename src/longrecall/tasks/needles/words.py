"""The words of needle keys: common English adjectives and nouns, a list of this package's own."""

from __future__ import annotations

_ADJECTIVES = """
able absent active actual afraid agile alert alike alive aloof amber ample ancient angry anxious apt arctic ardent
artful astute aware awful azure bald bare basic bitter bland blank bleak blind blond blue blunt bold bossy brave brief
bright brisk broad broken bronze brown bumpy busy calm candid careful cheap cheerful chief chilly civil clean clear
clever close cloudy clumsy coarse cold common complex cool coral costly covert cozy cranky crimson crisp crooked crude
cruel curious curly curved daily damp dapper daring dark dear decent deep dense direct dizzy dormant double drab dreamy
dry dull dusky dusty eager early earnest easy elder elegant empty endless entire equal exact exotic express faint fair
faithful false famous fancy fatal feeble fertile fierce final fine firm fixed flat fluent fluffy foggy foreign formal
frail frank free fresh friendly frosty frozen frugal full funny gentle giant giddy glad gleeful global gloomy golden
good graceful grand grassy grateful grave gray greasy great green grim gritty gruff guilty handy happy hardy harsh hasty
hazy healthy heavy helpful hidden hollow holy honest humble hungry icy ideal idle immense indigo inner innocent intense
ivory jagged jolly jovial joyful keen kind large late latent lavish lazy lean legal level light likely lilac little
lively local lofty lonely long loose loud lovely loyal lucid lucky lunar major marble maroon mellow merry mighty mild
minor misty modern modest moist muddy mute mystic naive narrow native neat nervous nimble noble noisy normal novel oaken
obscure odd olive open orange orderly ornate oval pale pastel patient pearly perfect petite plain playful pleasant
plump polite poor precise pretty prime private proper proud pure purple quaint quick quiet radiant rapid rare raw ready
real recent regal remote rich rigid ripe robust rocky rosy rough round royal rugged rural rustic sacred salty sandy
scarlet secret serene severe shady shallow sharp shiny short shrewd shy silent silken silver simple sincere single
sleepy slender slim slow smart smooth snowy sober soft solar solemn solid somber sour spare spicy spotted square stable
stale stark steady steep sterile stern sticky stormy stout strange strict strong sturdy subtle sudden sunny superb sweet
swift tall tame tangy tart tasty teal tender tense thick thin thorough tidy timid tiny tired tough tranquil true
trusty upper urban urgent useful usual vague valid vast velvet violet vital vivid warm wary watery weary weekly wet
white whole wicked wide wild windy wise wistful witty wooden woolen worthy yearly yellow young zealous
"""

_NOUNS = """
acorn actor airport album alley almond anchor angle ankle anthem apron arch arena armor arrow artist atlas attic autumn
avenue badge bakery ballad balloon bamboo banana banjo banner barber barley barn barrel basin basket beach beacon beard
beaver bed beetle bell bench berry bicycle bird biscuit blanket blossom board boat bonnet book boot border bottle
boulder bowl box bracelet branch bread breeze brick bridge broom brother brush bubble bucket buckle bugle butter button
cabin cable cactus cake camel camera camp canal candle canoe canvas canyon captain caravan carbon card cargo carpet
carrot cart castle cat cattle cave cedar cellar chain chair chalk channel chapel chariot cheese cherry chest chicken
chimney church cider circle circus city clay cliff clock cloth cloud clover coach coast coat cobweb coffee coin collar
colony comet compass copper cork corner cottage cotton couch country court cousin cradle crane crater creek cricket
crown crystal cup curtain cushion dairy dancer desert desk diamond dinner dock doctor dollar donkey door dragon drawer
dress drum eagle earth easel echo elbow elm ember engine envelope estate evening fabric falcon farm farmer father
feather fence fern ferry fiddle field finger fire fish flag flame flask fleet floor flour flower flute forest fork fort
fossil fountain fox frame friend frog fruit furnace galaxy gallery garden garlic garment gate geese ginger glacier
glass globe glove goat goblet grain granite grape grass guitar gutter hall hamlet hammer hammock harbor hare harp
harvest hat hawk hazel hedge helmet hen herald hermit heron hill hinge history hive honey hood horizon horn horse hotel
hour house hunter igloo infant inkwell insect iron island ivy jacket jar jewel jigsaw journal journey judge jungle
juniper kennel kettle key keyhole king kitchen kite kitten knight knot ladder lady lagoon lake lamp lantern larch lark
lawn lawyer leaf leather lemon leopard letter library lilac lily linen lion lizard lobster locket log lotus lumber
magnet maiden mango mantle map maple market mason mast meadow medal melody melon merchant metal meteor mill mine miner
mirror mitten monk monkey moon morning moss mother mountain mouse mule museum music mustard napkin necklace needle nest
net nickel night north novel nurse nutmeg oak oar oasis oat ocean office onion orchard orchid organ otter oven owl oxen
oyster paddle pail painter palace palm panther paper parade parcel parlor parrot pasture path pavement pear pebble
pencil pepper piano pickle picture pier pigeon pillow pilot pine pipe pirate pitcher planet plant plate plaza plow plum
pocket poet pond pony poppy porch port portrait potato potter powder prairie prince puddle pumpkin puppet puppy puzzle
queen quill quilt rabbit radish raft railway rain rainbow raven razor reef ribbon rice rider river road robin rocket
roof room rooster root rope rose ruby saddle sailor salad salmon sand sandal satin saucer scarf school scissors sculptor
seagull season seed shadow shed sheep shelf shell shepherd shield ship shirt shoe shore shovel sister sketch sky sled
sleeve smoke snail snow soap soldier sparrow spice spider spinach spire spoon spring square squirrel stable stair star
statue steam steel stem stone stool storm story stove stranger straw stream street string student sugar summer sunset
swan sweater sword table tailor tavern teacher teapot temple tent terrace theater thimble thistle thread throne thunder
ticket tiger timber tinsel toast tomato torch tower town trail train treasure tree trumpet tulip tunnel turnip turtle
twig uncle valley vanilla vase vessel village vine violet violin visitor voyage wagon waiter wall walnut walrus water
wave weaver wedding wharf wheat wheel whistle widow willow window winter wizard wolf wren writer yard yarn zebra zipper
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
